// What attention needs of sm_90a beyond hopper.cuh: TMA loads of four dimensions, WGMMA with transposed operands and
// operands in registers, setmaxnreg.
//
// A panel is a matrix of 64 16-bit columns in shared memory in the 128-byte swizzle: rows of 128 bytes, of which row r
// keeps its 16-byte unit u at u ^ (r % 8). It starts at a multiple of 1024 bytes.
#pragma once

#include <type_traits>

#include "cuda_mma.cuh"
#include "hopper.cuh"

namespace lamina {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kWarpgroup = 128;  // threads

// Named barrier of `threads` threads, some of which only arrive.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// TMA load of a box of a tensor of four dimensions; its bytes count on the barrier.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& from, int x, int y, int z, int w,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&from), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

template <int count>
__device__ __forceinline__ void allocate_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void deallocate_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(count));
}

// Keeps the compiler from moving uses of registers across the asynchronous WGMMAs around it.
template <typename Register, int count>
__device__ __forceinline__ void pin(Register (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Register, float>)
      asm volatile("" : "+f"(registers[i])::"memory");
    else
      asm volatile("" : "+r"(registers[i])::"memory");
  }
}

// wgmma: sum[64 x 128] = or += left[64 x 16] * right[128 x 16]ᵀ, both operands panels in shared memory. `sum` is in the
// accumulator layout of hopper.cuh's wgmma.
#define LAMINA_FROM_SHARED(type)                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" LAMINA_IN64 \
               "}, %64, %65, %66, 1, 1, 0, 0;"                                               \
               : LAMINA_OUT64(0)                                                             \
               : "l"(left), "l"(right), "n"(adds))
template <typename T, int adds>
__device__ __forceinline__ void wgmma_panels(float (&sum)[64], uint64_t left, uint64_t right) {
  if constexpr (std::is_same_v<T, __half>)
    LAMINA_FROM_SHARED("f16");
  else
    LAMINA_FROM_SHARED("bf16");
}

// wgmma: sum[64 x columns] = or += left[64 x 16] * right. A lane's four registers have of `left` what a lane of
// multiply_add has; `right` is panels: of [16 x columns] where transposed, else of [columns x 16]ᵀ.
#define LAMINA_FROM_REGISTERS(columns, type, in, a0, a1, a2, a3, b, one, two, ...)                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" in "}, {%" #a0 ", %" #a1 \
               ", %" #a2 ", %" #a3 "}, %" #b ", %" #one ", 1, 1, %" #two ";"                                       \
               : __VA_ARGS__                                                                                       \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(adds), "n"(transposed))
template <typename T, int adds, int transposed>
__device__ __forceinline__ void wgmma_registers(float (&sum)[64], const uint32_t* left, uint64_t right) {
  if constexpr (std::is_same_v<T, __half>)
    LAMINA_FROM_REGISTERS(128, "f16", LAMINA_IN64, 64, 65, 66, 67, 68, 69, 70, LAMINA_OUT64(0));
  else
    LAMINA_FROM_REGISTERS(128, "bf16", LAMINA_IN64, 64, 65, 66, 67, 68, 69, 70, LAMINA_OUT64(0));
}

template <typename T, int adds, int transposed>
__device__ __forceinline__ void wgmma_registers(float (&sum)[32], const uint32_t* left, uint64_t right) {
  if constexpr (std::is_same_v<T, __half>)
    LAMINA_FROM_REGISTERS(64, "f16", LAMINA_IN32, 32, 33, 34, 35, 36, 37, 38, LAMINA_OUT16(0), LAMINA_OUT16(16));
  else
    LAMINA_FROM_REGISTERS(64, "bf16", LAMINA_IN32, 32, 33, 34, 35, 36, 37, 38, LAMINA_OUT16(0), LAMINA_OUT16(16));
}

// The same for any number of columns, added, of right panels that are not transposed.
#define LAMINA_FROM_REGISTERS_OF(type)                                                                           \
  if constexpr (columns == 8)                                                                                    \
    LAMINA_FROM_REGISTERS(8, type, LAMINA_IN4, 4, 5, 6, 7, 8, 9, 10, LAMINA_OUT4(0));                            \
  else if constexpr (columns == 16)                                                                              \
    LAMINA_FROM_REGISTERS(16, type, LAMINA_IN8, 8, 9, 10, 11, 12, 13, 14, LAMINA_OUT4(0), LAMINA_OUT4(4));       \
  else if constexpr (columns == 32)                                                                              \
    LAMINA_FROM_REGISTERS(32, type, LAMINA_IN16, 16, 17, 18, 19, 20, 21, 22, LAMINA_OUT16(0));                   \
  else if constexpr (columns == 64)                                                                              \
    LAMINA_FROM_REGISTERS(64, type, LAMINA_IN32, 32, 33, 34, 35, 36, 37, 38, LAMINA_OUT16(0), LAMINA_OUT16(16)); \
  else                                                                                                           \
    LAMINA_FROM_REGISTERS(128, type, LAMINA_IN64, 64, 65, 66, 67, 68, 69, 70, LAMINA_OUT64(0))
template <int columns, typename T>
__device__ __forceinline__ void wgmma_from_registers(float (&sum)[columns / 2], const uint32_t* left, uint64_t right,
                                                     T) {
  static_assert(columns == 8 || columns == 16 || columns == 32 || columns == 64 || columns == 128);
  constexpr int adds = 1, transposed = 0;
  if constexpr (std::is_same_v<T, __half>) {
    LAMINA_FROM_REGISTERS_OF("f16");
  } else {
    LAMINA_FROM_REGISTERS_OF("bf16");
  }
}
#undef LAMINA_FROM_SHARED
#undef LAMINA_FROM_REGISTERS_OF
#undef LAMINA_FROM_REGISTERS

}  // namespace lamina
