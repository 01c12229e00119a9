// Rotation of a head by the angles of its position: the first half's elements pair with the second half's.
#pragma once

#include "kv_cache.cuh"
#include "launch.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace lamina {

// Elements of the two halves, rotated: multiplications and sums are rounded one by one, as the formula does it, so no
// fused multiply-add.
__device__ __forceinline__ float2 rotated(float x1, float x2, float cos, float sin) {
  return {__fsub_rn(__fmul_rn(x1, cos), __fmul_rn(x2, sin)), __fadd_rn(__fmul_rn(x2, cos), __fmul_rn(x1, sin))};
}

template <typename T, int kWidth>
__device__ __forceinline__ void rotate(Vec<T, kWidth>& first, Vec<T, kWidth>& second, const float (&cos)[kWidth],
                                       const float (&sin)[kWidth]) {
  float x1[kWidth], x2[kWidth];
  to_floats(x1, first);
  to_floats(x2, second);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float2 both = rotated(x1[i], x2[i], cos[i], sin[i]);
    x1[i] = both.x, x2[i] = both.y;
  }
  first = from_floats<T>(x1);
  second = from_floats<T>(x2);
}

// Both halves of a head at one column, moved and rotated.
template <typename T, int kWidth>
__device__ __forceinline__ void move_rotated(const T* from, T* to, int half, const float (&cos)[kWidth],
                                             const float (&sin)[kWidth]) {
  Vec<T, kWidth> first = load<kWidth>(from), second = load<kWidth>(from + half);
  rotate(first, second, cos, sin);
  store_raw(to, first.raw);
  store_raw(to + half, second.raw);
}

// Two neighbours of each half, packed.
template <typename T>
__device__ __forceinline__ void rotate(uint32_t& first, uint32_t& second, const float2& cos, const float2& sin) {
  const float2 x1 = reinterpret_cast<const Pair<T>&>(first).unpack();
  const float2 x2 = reinterpret_cast<const Pair<T>&>(second).unpack();
  const float2 low = rotated(x1.x, x2.x, cos.x, sin.x), high = rotated(x1.y, x2.y, cos.y, sin.y);
  reinterpret_cast<Pair<T>&>(first).pack(low.x, high.x);
  reinterpret_cast<Pair<T>&>(second).pack(low.y, high.y);
}

template <int kWidth>
__device__ __forceinline__ void load_floats(float (&to)[kWidth], const float* from) {
  constexpr int kStep = kWidth == 1 ? 1 : kVecWidth<float>;
#pragma unroll
  for (int i = 0; i < kWidth; i += kStep) {
    float part[kStep];
    to_floats(part, load<kStep>(from + i));
#pragma unroll
    for (int j = 0; j < kStep; ++j) to[i + j] = part[j];
  }
}

constexpr int kRotaryThreads = 512;

}  // namespace lamina
