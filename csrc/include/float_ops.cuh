// Float arithmetic by single PTX instructions: a maximum that keeps NaN, a fast exponential.
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

}  // namespace lamina
