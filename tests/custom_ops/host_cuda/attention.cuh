// In place of cuda_mma.cuh, cache_policy.cuh, fp8.cuh and scaled_half.cuh: what the attention kernels of all GPUs need
// to run on a host as plain C++, in bfloat16. Copies arrive when they are waited for.
#pragma once

#include <deque>

#include "bf16.cuh"
#include "float_ops.cuh"
#include "launch.cuh"
#include "vec.cuh"

#define __grid_constant__

struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct __half {
  uint16_t bits;
};
uint32_t __byte_perm(uint32_t, uint32_t, uint32_t);

inline void __syncwarp() { host::share(0); }
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline void __threadfence() {}
inline bool __syncthreads_or(bool value) {
  static bool any[2];  // of this barrier, and of the next
  static unsigned round;
  bool& own = any[host::sync_round % 2];
  if (host::num_synced == 0 && round != host::sync_round) own = false, round = host::sync_round;
  own |= value;
  host::sync();
  return own;
}

namespace host {

struct Copy {
  void* to;
  const void* from;  // null: zeros
};
inline std::vector<std::deque<std::vector<Copy>>> copies;  // of each thread: groups, the last of which is open

inline void arrive(const std::vector<Copy>& group) {
  for (const auto& [to, from] : group) from == nullptr ? std::memset(to, 0, 16) : std::memcpy(to, from, 16);
}

}  // namespace host

namespace lamina {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kCodeOfBf16 = 1;

inline uint64_t evict_first() { return 0; }
inline uint64_t evict_normal() { return 0; }

template <typename T>
T* opaque(T* pointer) {
  return pointer;
}
inline void copy_async(void* to, const void* from, bool copied, uint64_t) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) std::abort();
  host::copies[threadIdx.x].back().push_back({to, copied ? from : nullptr});
}
inline void copy_async_unless(bool is_left_out, void* to, const void* from, bool copied, uint64_t policy) {
  if (!is_left_out) copy_async(to, from, copied, policy);
}
inline void commit_copies() { host::copies[threadIdx.x].emplace_back(); }
template <int pending>
void wait_for_copies() {
  auto& own = host::copies[threadIdx.x];
  for (; own.size() > pending + 1; own.pop_front()) host::arrive(own.front());
}

// ---- ldmatrix, movmatrix and mma.sync: lanes give what they hold, and each takes its own elements

inline uint32_t half_of(const std::array<uint64_t, host::kWarp>& given, unsigned lane, int half) {
  return static_cast<uint32_t>(given[lane] >> 16 * half) & 0xffff;
}
inline void load_matrices(uint32_t (&to)[4], const void* row) {
  const auto rows = host::share(row);
  for (unsigned m = 0; m < 4; ++m)
    std::memcpy(&to[m], reinterpret_cast<const char*>(rows[m * 8 + threadIdx.x % 32 / 4]) + threadIdx.x % 4 * 4, 4);
}
inline uint32_t transpose_matrix(uint32_t matrix) {
  const auto words = host::share(matrix);
  const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const int half = static_cast<int>(row % 2);
  return half_of(words, column * 4 + row / 2, half) | half_of(words, (column + 1) * 4 + row / 2, half) << 16;
}
inline void load_transposed_matrices(uint32_t (&to)[4], const void* row) {
  load_matrices(to, row);
  for (uint32_t& matrix : to) matrix = transpose_matrix(matrix);
}
inline float as_float(uint64_t registers, int at) {
  Bf16 value;
  value.bits = static_cast<uint16_t>(registers >> at);
  return static_cast<float>(value);
}
template <typename T>
void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2], T) {
  std::array<uint64_t, 32> halves[2];
  for (int i = 0; i < 2; ++i) halves[i] = host::share(uint64_t{left[2 * i + 1]} << 32 | left[2 * i]);
  const auto of_right = host::share(uint64_t{right[1]} << 32 | right[0]);
  const unsigned first = threadIdx.x % 32 / 4 * 4;
  for (int i = 0; i < 4; ++i) {
    const unsigned column = threadIdx.x % 4 * 2 + static_cast<unsigned>(i % 2);
    for (int k = 0; k < 16; ++k)
      sum[i] += as_float(halves[k / 8][first + k % 8 / 2], 32 * (i / 2) + 16 * (k % 2)) *
                as_float(of_right[column * 4 + k % 8 / 2], 32 * (k / 8) + 16 * (k % 2));
  }
}
inline uint32_t pack(float low, float high, Bf16) { return Bf16(low).bits | uint32_t{Bf16(high).bits} << 16; }
uint32_t pack(float, float, __half);

template <typename T>
struct Pair;
template <>
struct Pair<Bf16> {
  Bf16 both[2];
  float2 unpack() const { return {static_cast<float>(both[0]), static_cast<float>(both[1])}; }
  void pack(float x, float y) { both[0] = Bf16(x), both[1] = Bf16(y); }
};

// ---- fp8.cuh and scaled_half.cuh: names alone, as nothing here is in FP8

struct Float8 {
  uint8_t bits;
};
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
