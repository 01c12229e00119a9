// FP8 (e4m3: at most 448, no infinity), as keys and values may be stored: conversions, exact where they widen.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace lamina {

struct Float8 {
  uint8_t bits;
};

constexpr float kLargestFp8 = 448.0f;

// Four numbers to float16, which holds each exactly: those of the low bytes, then of the high ones.
__device__ __forceinline__ void fp8_to_halves(uint32_t& low, uint32_t& high, uint32_t four) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
#else
  // Exponents count from 7 in place of 15: off by 2^8, which a multiplication mends for subnormal numbers, too.
  const auto widen = [](uint32_t bytes) {
    const uint32_t size = bytes & 0x7f007f00u, half = (bytes & 0x80008000u) | (size >> 1);
    const __half2 widened = __hmul2(reinterpret_cast<const __half2&>(half), __float2half2_rn(256.0f));
    return reinterpret_cast<const uint32_t&>(widened) | (__vcmpeq2(size, 0x7f007f00u) & 0x7e007e00u);
  };
  low = widen(__byte_perm(four, 0, 0x1404));
  high = widen(__byte_perm(four, 0, 0x3424));
#endif
}

// Two floats to the bytes of one register's low half, the first in its low byte. Rounds to the nearest, ties to even;
// what is beyond the largest becomes it, a NaN stays a NaN.
__device__ __forceinline__ uint32_t floats_to_fp8(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  const auto narrow = [](float x) -> uint32_t {
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80, size = __float_as_uint(fminf(fabsf(x), kLargestFp8));
    if (x != x) return 0x7f;
    if (size < 121u << 23) return sign | static_cast<uint32_t>(__float2int_rn(__uint_as_float(size) * 512.0f));
    return sign | ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
  };
  return narrow(first) | narrow(second) << 8;
#endif
}

}  // namespace lamina
