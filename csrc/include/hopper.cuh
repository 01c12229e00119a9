// Instructions of sm_90a: mbarriers, TMA loads, WGMMA, thread-block clusters with distributed shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "architecture.cuh"
#include "block_cluster.cuh"
#include "byte_formats.cuh"
#include "cache_policy.cuh"
#include "cuda_mma.cuh"

namespace lamina {

// ---- mbarriers

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the TMA unit and to the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier that lies at this offset in a block of the cluster. Orders no memory: a release to the
// cluster would cost a microsecond.
__device__ __forceinline__ void arrive_at_peer(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 address;\n"
      "mapa.shared::cluster.u32 address, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [address];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Arrives, and lets the barrier wait for this many bytes of TMA loads as well.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t result;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(result)
      : "r"(barrier), "r"(parity)
      : "memory");
  return result != 0;
}

// Clocks of the multiprocessor, modulo 2^32.
__device__ __forceinline__ uint32_t clocks() {
  uint32_t result;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(result)::"memory");
  return result;
}

// Four floats of this block's shared memory.
__device__ __forceinline__ float4 load_four(uint32_t offset) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(offset)
               : "memory");
  return four;
}

// Four words of it, or one.
__device__ __forceinline__ uint4 load_words(uint32_t offset) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(offset)
               : "memory");
  return words;
}

__device__ __forceinline__ uint32_t load_word(uint32_t offset) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(offset) : "memory");
  return word;
}

// The pointer to this block's shared memory at an offset.
__device__ __forceinline__ float* shared_floats(uint32_t offset) {
  return static_cast<float*>(__cvta_shared_to_generic(offset));
}

// ---- TMA: bulk tensor copies

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the map's box at (column, row) to shared memory; elements out of bounds arrive as zeros.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

// The same of a tensor of four dimensions.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int x, int y, int z, int w,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}

// TMA multicast: as the first, to the same offset in every block of the cluster whose bit is set, counting on the
// barrier there.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap* map, int column, int row,
                                                   uint32_t barrier, uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks), "l"(policy)
      : "memory");
}

// cp.async.bulk: copies bytes in one piece, a multiple of 16 from and to multiples of 16, to shared memory.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// cp.async.bulk.prefetch: has so many bytes, a multiple of 16 from a multiple of 16 on, come to the L2 cache.
__device__ __forceinline__ void bulk_prefetch_to_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Orders this thread's generic-proxy stores to shared memory before what TMA and WGMMA do next (async proxy).
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- WGMMA: asynchronous warpgroup matrix multiply-accumulate

// The matrix descriptor of a tile of 16-bit elements in shared memory: rows of 64 elements in TMA's 128-byte swizzle,
// aligned to 1024 bytes. Bits 0-13 are the address, 16-29 the bytes from tile to tile (of an operand whose columns are
// columns of the result; else of no use), 32-45 the bytes from 8 rows to the next 8, all in units of 16; bit 62 is the
// swizzle. Steps of 16 columns are 2 apart.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, int tile_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kRowGroup = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kRowGroup | static_cast<uint64_t>(tile_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` committed groups of WGMMAs are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define LAMINA_SUMS4(as, i) as(sum[i]), as(sum[i + 1]), as(sum[i + 2]), as(sum[i + 3])
#define LAMINA_SUMS16(as, i) \
  LAMINA_SUMS4(as, i), LAMINA_SUMS4(as, i + 4), LAMINA_SUMS4(as, i + 8), LAMINA_SUMS4(as, i + 12)
#define LAMINA_SUMS64(as, i) \
  LAMINA_SUMS16(as, i), LAMINA_SUMS16(as, i + 16), LAMINA_SUMS16(as, i + 32), LAMINA_SUMS16(as, i + 48)
#define LAMINA_OUT4(i) LAMINA_SUMS4("+f", i)
#define LAMINA_OUT16(i) LAMINA_SUMS16("+f", i)
#define LAMINA_OUT64(i) LAMINA_SUMS64("+f", i)
#define LAMINA_IN4 "%0, %1, %2, %3"
#define LAMINA_IN8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LAMINA_IN16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LAMINA_IN32 \
  LAMINA_IN16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LAMINA_IN64                                                                  \
  LAMINA_IN32                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LAMINA_IN48 \
  LAMINA_IN32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LAMINA_IN96                                                                  \
  LAMINA_IN64                                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LAMINA_IN128                                                                             \
  LAMINA_IN64                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// wgmma: sum[64 x columns] += left[64 x 16] * right[columns x 16]ᵀ, both operands in shared memory. A lane holds of
// each 8 columns two neighbours of a row, then the same of the row 8 below; its warp has 16 rows.
#define LAMINA_WGMMA(columns, type, in, a, b, one, ...)                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" in "}, %" #a ", %" #b \
               ", %" #one ", 1, 1, 0, 0;"                                                                       \
               : __VA_ARGS__                                                                                    \
               : "l"(left), "l"(right), "n"(1))

#define LAMINA_DEFINE_WGMMA(Type, type)                                                                      \
  template <int columns>                                                                                     \
  __device__ __forceinline__ void wgmma(float (&sum)[columns / 2], uint64_t left, uint64_t right, Type) {    \
    static_assert(columns == 8 || columns == 16 || columns == 32 || columns == 64 || columns == 96 ||        \
                  columns == 128 || columns == 192 || columns == 256);                                       \
    if constexpr (columns == 8) {                                                                            \
      LAMINA_WGMMA(8, type, LAMINA_IN4, 4, 5, 6, LAMINA_OUT4(0));                                            \
    } else if constexpr (columns == 16) {                                                                    \
      LAMINA_WGMMA(16, type, LAMINA_IN8, 8, 9, 10, LAMINA_OUT4(0), LAMINA_OUT4(4));                          \
    } else if constexpr (columns == 32) {                                                                    \
      LAMINA_WGMMA(32, type, LAMINA_IN16, 16, 17, 18, LAMINA_OUT16(0));                                      \
    } else if constexpr (columns == 64) {                                                                    \
      LAMINA_WGMMA(64, type, LAMINA_IN32, 32, 33, 34, LAMINA_OUT16(0), LAMINA_OUT16(16));                    \
    } else if constexpr (columns == 96) {                                                                    \
      LAMINA_WGMMA(96, type, LAMINA_IN48, 48, 49, 50, LAMINA_OUT16(0), LAMINA_OUT16(16), LAMINA_OUT16(32));  \
    } else if constexpr (columns == 192) {                                                                   \
      LAMINA_WGMMA(192, type, LAMINA_IN96, 96, 97, 98, LAMINA_OUT64(0), LAMINA_OUT16(64), LAMINA_OUT16(80)); \
    } else if constexpr (columns == 128) {                                                                   \
      LAMINA_WGMMA(128, type, LAMINA_IN64, 64, 65, 66, LAMINA_OUT64(0));                                     \
    } else {                                                                                                 \
      LAMINA_WGMMA(256, type, LAMINA_IN128, 128, 129, 130, LAMINA_OUT64(0), LAMINA_OUT64(64));               \
    }                                                                                                        \
  }
LAMINA_DEFINE_WGMMA(__nv_bfloat16, "bf16")
LAMINA_DEFINE_WGMMA(__half, "f16")

// The same of operands in one byte, 32 columns of each at once; the sums begin at zero where `adds` is 0. Those of
// whole numbers are exact.
#define LAMINA_WGMMA_BYTES(columns, types, signs, in, a, b, one, ...)                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k32." types " {" in "}, %" #a ", %" #b ", %" #one signs \
               ";"                                                                                                   \
               : __VA_ARGS__                                                                                         \
               : "l"(left), "l"(right), "n"(adds))

#define LAMINA_DEFINE_WGMMA_BYTES(Format, Sum, as, types, signs)                                                       \
  template <int columns, int adds>                                                                                     \
  __device__ __forceinline__ void wgmma_bytes(Sum(&sum)[columns / 2], uint64_t left, uint64_t right, Format) {         \
    static_assert(columns == 8 || columns == 16 || columns == 32 || columns == 64 || columns == 96 ||                  \
                  columns == 128 || columns == 192 || columns == 256);                                                 \
    if constexpr (columns == 8) {                                                                                      \
      LAMINA_WGMMA_BYTES(8, types, signs, LAMINA_IN4, 4, 5, 6, LAMINA_SUMS4(as, 0));                                   \
    } else if constexpr (columns == 16) {                                                                              \
      LAMINA_WGMMA_BYTES(16, types, signs, LAMINA_IN8, 8, 9, 10, LAMINA_SUMS4(as, 0), LAMINA_SUMS4(as, 4));            \
    } else if constexpr (columns == 32) {                                                                              \
      LAMINA_WGMMA_BYTES(32, types, signs, LAMINA_IN16, 16, 17, 18, LAMINA_SUMS16(as, 0));                             \
    } else if constexpr (columns == 64) {                                                                              \
      LAMINA_WGMMA_BYTES(64, types, signs, LAMINA_IN32, 32, 33, 34, LAMINA_SUMS16(as, 0), LAMINA_SUMS16(as, 16));      \
    } else if constexpr (columns == 96) {                                                                              \
      LAMINA_WGMMA_BYTES(96, types, signs, LAMINA_IN48, 48, 49, 50, LAMINA_SUMS16(as, 0), LAMINA_SUMS16(as, 16),       \
                         LAMINA_SUMS16(as, 32));                                                                       \
    } else if constexpr (columns == 128) {                                                                             \
      LAMINA_WGMMA_BYTES(128, types, signs, LAMINA_IN64, 64, 65, 66, LAMINA_SUMS64(as, 0));                            \
    } else if constexpr (columns == 192) {                                                                             \
      LAMINA_WGMMA_BYTES(192, types, signs, LAMINA_IN96, 96, 97, 98, LAMINA_SUMS64(as, 0), LAMINA_SUMS16(as, 64),      \
                         LAMINA_SUMS16(as, 80));                                                                       \
    } else {                                                                                                           \
      LAMINA_WGMMA_BYTES(256, types, signs, LAMINA_IN128, 128, 129, 130, LAMINA_SUMS64(as, 0), LAMINA_SUMS64(as, 64)); \
    }                                                                                                                  \
  }
LAMINA_DEFINE_WGMMA_BYTES(Float8, float, "+f", "f32.e4m3.e4m3", ", 1, 1")
LAMINA_DEFINE_WGMMA_BYTES(Int8, int, "+r", "s32.s8.s8", "")

template <int columns>
__device__ __forceinline__ void wgmma(int (&sum)[columns / 2], uint64_t left, uint64_t right, Int8 format) {
  wgmma_bytes<columns, 1>(sum, left, right, format);
}

// ---- clusters

// st.async: two floats, or four, to this offset in a block of the cluster, counting on the barrier there.
__device__ __forceinline__ void send_to_peer(uint32_t to, float x, float y, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 address, peer_barrier;\n"
      "mapa.shared::cluster.u32 address, %0, %4;\n"
      "mapa.shared::cluster.u32 peer_barrier, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [address], {%1, %2}, [peer_barrier];\n"
      "}" ::"r"(to),
      "f"(x), "f"(y), "r"(barrier), "r"(rank)
      : "memory");
}

__device__ __forceinline__ void send_to_peer(uint32_t to, const float4& four, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 address, peer_barrier;\n"
      "mapa.shared::cluster.u32 address, %0, %6;\n"
      "mapa.shared::cluster.u32 peer_barrier, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [address], {%1, %2, %3, %4}, [peer_barrier];\n"
      "}" ::"r"(to),
      "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(barrier), "r"(rank)
      : "memory");
}

// ld.shared::cluster: four floats at this offset in a block's shared memory.
__device__ __forceinline__ float4 load_from_peer(uint32_t offset, uint32_t rank) {
  uint32_t address;
  float4 values;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(offset), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(address)
               : "memory");
  return values;
}

}  // namespace lamina
