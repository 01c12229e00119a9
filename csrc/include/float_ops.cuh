// Float arithmetic by single PTX instructions: a maximum that keeps NaN, fast exponentials and reciprocals.
#pragma once

namespace lamina {

constexpr float kLog2E = 1.44269504f;

// Largest of two, NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 2^x within 2 ulp; 0 where x is below -126.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x within 1 ulp; 0 where x is above 2^126.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x / (1 + exp(power)), to be rounded to 16 bits: some units in the last place of a float, which those hardly ever see,
// buy most of the instructions.
__device__ __forceinline__ float over_one_and_exp(float x, float power) {
  return x * reciprocal_fast(1.0f + exp2_fast(kLog2E * power));
}

}  // namespace lamina
