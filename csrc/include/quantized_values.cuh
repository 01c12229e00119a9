// Values of one byte of floats: their scale, max(|x|) / the largest number of the format, and x / scale.
#pragma once

#include <cuda_fp8.h>

#include "byte_formats.cuh"
#include "float_ops.cuh"
#include "vec.cuh"

namespace lamina {

constexpr float kSmallestPeak = 1.17549435e-38f;  // float's smallest normal number

template <typename Format>
__device__ __forceinline__ float scale_of(float peak) {
  return __fdiv_rn(max_or_nan(peak, kSmallestPeak), kLargest<Format>);
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

// Two floats to bytes, the first the lower: to the nearest, ties to even; of what is no number e4m3 has one, too, whole
// numbers have 0.
__device__ __forceinline__ uint32_t pair_to_bytes(float first, float second, Float8) {
  return __nv_cvt_float2_to_fp8x2(float2{first, second}, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint32_t pair_to_bytes(float first, float second, Int8) {
  return (__float2int_rn(first) & 0xff) | (__float2int_rn(second) & 0xff) << 8;
}

// x / scale, rounded to the nearest, of many x that are no larger than some hundred times the scale. The quotient by
// the reciprocal is mended by what it leaves of x, which gives the bits of a division where nothing underflows (P.
// Markstein, IA-64 and Elementary Functions, 2000): so scales that are very small or large are shifted, and x with
// them. By an infinite one numbers are zeros.
struct Divider {
  __device__ __forceinline__ explicit Divider(float scale) {
    constexpr float kUp = 1208925819614629174706176.0f;  // 2^80
    shift = scale < 1.0f / kUp ? kUp : scale > kUp ? 1.0f / kUp : 1.0f;
    divisor = scale > 3.4e38f ? 0.0f : scale * shift;
    inverse = divisor == 0.0f ? 0.0f : 1.0f / divisor;
  }

  __device__ __forceinline__ float divide(float x) const {
    const float shifted = x * shift, quotient = shifted * inverse;
    return fmaf(-fmaf(quotient, divisor, -shifted), inverse, quotient);  // so that -0 stays -0
  }

  float shift, divisor, inverse;
};

// Eight values of 16 bits, written where they count.
template <typename Format, typename T>
__device__ __forceinline__ void store_bytes(uint8_t* to, const Vec<T, 8>& vec, float scale, bool counts = true) {
  float values[8];
  to_floats(values, vec);
  const Divider by(scale);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    words[i / 4] |= pair_to_bytes(by.divide(values[i]), by.divide(values[i + 1]), Format{}) << i % 4 * 8;
  asm volatile("" : "+r"(words[0]), "+r"(words[1]));  // made in any case
  if (counts) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
}

}  // namespace lamina
