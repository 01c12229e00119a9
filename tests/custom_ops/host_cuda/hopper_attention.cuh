// In place of what the attention kernels of Hopper include of csrc/include: what they need to run on a host as plain
// C++, in bfloat16, beside what clusters need.
#pragma once

#include "cluster.cuh"

#define __CUDA_ARCH_FEAT_SM90_ALL

struct __half {
  uint16_t bits;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
uint32_t __byte_perm(uint32_t, uint32_t, uint32_t);
bool __syncthreads_or(bool);

template <typename Value>
Value __shfl_up_sync(unsigned, const Value& value, int distance) {
  const unsigned lane = threadIdx.x % 32, offset = static_cast<unsigned>(distance);
  return host::from_lane(value, lane < offset ? lane : lane - offset);
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline void __threadfence() {}
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
using std::fmaf;
using std::fmaxf;

namespace lamina {

constexpr int kPanelColumns = 64, kPanelRowBytes = 128, kWarpgroup = 128;
inline int narrow(int64_t x) { return static_cast<int>(x); }

// ---- cuda_mma.cuh, of which the other kernels' instructions are names alone

inline uint64_t evict_normal() { return 0; }
template <typename T>
T* opaque(T* pointer) {
  return pointer;
}
void copy_async(void*, const void*, bool, uint64_t);
void copy_async_unless(bool, void*, const void*, bool, uint64_t);
void commit_copies();
template <int pending>
void wait_for_copies();
void load_transposed_matrices(uint32_t (&)[4], const void*);
inline void load_matrices(uint32_t (&to)[4], const void* row) { load_matrices(to, shared_address(row)); }
uint32_t pack(float, float, __half);

// ---- warpgroup.cuh

inline uint64_t tile_descriptor(uint32_t offset, int tile_bytes) {
  return uint64_t{offset / 16} | static_cast<uint64_t>(tile_bytes >> 4) << 16;
}
// Of a panel's 16 rows from here on one, and one of the columns of all panels.
inline float element_of_panels(uint64_t tile, int row, int column) {
  const uint32_t panel = static_cast<uint32_t>(column / 64) * static_cast<uint32_t>(tile >> 16);
  return element<Bf16>((tile & 0xffff) + panel, row, column % 64);
}
template <typename T, int adds>
void wgmma_panels(float (&sums)[64], uint64_t left, uint64_t right) {
  host::current->wgmmas.emplace_back([sum = &sums[0], left, right] {
    if (adds == 0) std::fill_n(sum, 64, 0.0f);
    wgmma_now<128, T>(sum, left & 0xffff, right & 0xffff);
  });
}
template <typename T, int adds, int transposed, int count>
void wgmma_registers(float (&sums)[count], const uint32_t* left, uint64_t right) {
  host::current->wgmmas.emplace_back([sum = &sums[0], left, right] {
    if (adds == 0) std::fill_n(sum, count, 0.0f);
    std::array<uint64_t, 32> halves[2];
    for (int i = 0; i < 2; ++i) halves[i] = host::multicast(uint64_t{left[2 * i + 1]} << 32 | left[2 * i]);
    float of_rows[2][16];
    for (int k = 0; k < 32; ++k) {
      Bf16 value;
      value.bits = static_cast<uint16_t>(halves[k % 16 / 8][threadIdx.x % 32 / 4 * 4 + k % 8 / 2] >>
                                         (32 * (k / 16) + 16 * (k % 2)));
      of_rows[k / 16][k % 16] = static_cast<float>(value);
    }
    for (int i = 0; i < count; ++i) {
      const int column = i / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2;
      for (int k = 0; k < 16; ++k)
        sum[i] += of_rows[i % 4 / 2][k] * (transposed ? element_of_panels(right, k, column)
                                                      : element<Bf16>(right & 0xffff, column, k));
    }
  });
}

// ---- vec.cuh

template <typename T>
constexpr int kVecWidth = 16 / static_cast<int>(sizeof(T));
template <typename T>
struct Pair;
template <>
struct Pair<Bf16> {
  Bf16 both[2];
  float2 unpack() const { return {static_cast<float>(both[0]), static_cast<float>(both[1])}; }
  void pack(float x, float y) { both[0] = Bf16(x), both[1] = Bf16(y); }
};

// ---- fp8.cuh and scaled_half.cuh: names alone, as nothing here is in FP8

uint32_t floats_to_fp8(float, float);
void fp8_to_halves(uint32_t&, uint32_t&, uint32_t);
struct PowerOfTwo {
  float value() const;
  float inverse() const;
};
PowerOfTwo up_to_14(float);
template <typename T>
float larger_of(uint32_t);
template <typename T>
uint32_t scaled_halves(uint32_t, float);

}  // namespace lamina
