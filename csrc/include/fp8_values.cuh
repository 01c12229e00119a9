// Values in FP8 (e4m3) of floats: their scale, max(|x|) / 448, and x / scale.
#pragma once

#include <cuda_fp8.h>

#include "float_ops.cuh"
#include "fp8.cuh"
#include "vec.cuh"

namespace lamina {

constexpr float kSmallestPeak = 1.17549435e-38f;  // float's smallest normal number

__device__ __forceinline__ float scale_of(float peak) {
  return __fdiv_rn(max_or_nan(peak, kSmallestPeak), kLargestFp8);
}

template <typename T, int kWidth>
__device__ __forceinline__ float peak_of(const Vec<T, kWidth>& vec) {
  float values[kWidth], peak = 0.0f;
  to_floats(values, vec);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) peak = max_or_nan(peak, fabsf(values[i]));
  return peak;
}

// Every one of kLanes neighbouring lanes gets the largest.
template <int kLanes>
__device__ __forceinline__ float lanes_peak(float peak) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    peak = max_or_nan(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
  return peak;
}

// Eight values of 16 bits.
template <typename T>
__device__ __forceinline__ void store_fp8(uint8_t* to, const Vec<T, 8>& vec, float scale) {
  float values[8];
  to_floats(values, vec);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 steps = {__fdiv_rn(values[i], scale), __fdiv_rn(values[i + 1], scale)};
    words[i / 4] |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(steps, __NV_SATFINITE, __NV_E4M3)) << i % 4 * 8;
  }
  *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
}

}  // namespace lamina
