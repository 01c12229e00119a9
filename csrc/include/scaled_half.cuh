// Rows of bfloat16 or float16 as float16: multiplied by a power of 2 that keeps all of their bits that matter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda_mma.cuh"
#include "vec.cuh"

namespace lamina {

// 2^(exponent - 127), by the exponent of a float.
struct PowerOfTwo {
  uint32_t exponent;
  __device__ __forceinline__ float value() const { return __uint_as_float(exponent << 23); }
  __device__ __forceinline__ float inverse() const { return __uint_as_float((254 - exponent) << 23); }
};

// What takes a number of this size to 2^14 and beyond, but not to 2^15; as far as that is a float.
__device__ __forceinline__ PowerOfTwo up_to_14(float size) {
  const uint32_t exponent = max(__float_as_uint(size) >> 23, 28u);
  return {127 + 14 + 127 - exponent};
}

// The larger size of two numbers in a register.
template <typename T>
__device__ __forceinline__ float larger_of(uint32_t pair) {
  const float2 both = reinterpret_cast<const Pair<T>&>(pair).unpack();
  return fmaxf(fabsf(both.x), fabsf(both.y));
}

// Two numbers in a register, as float16, multiplied.
template <typename T>
__device__ __forceinline__ uint32_t scaled_halves(uint32_t pair, float factor) {
  const float2 both = reinterpret_cast<const Pair<T>&>(pair).unpack();
  return pack(both.x * factor, both.y * factor, __half{});
}

}  // namespace lamina
