// FP8 (e4m3) on a host, and what else is asked for where values are made of that type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

// e4m3: a sign, four bits of exponent, three of mantissa.
struct __nv_fp8_e4m3 {
  uint8_t bits = 0;
  explicit operator float() const {
    const int size = bits & 127, exponent = size >> 3;
    const double value = exponent == 0 ? std::ldexp(size, -9) : std::ldexp(8 + (size & 7), exponent - 10);
    return static_cast<float>(bits & 128 ? -value : value);
  }
};

inline int __float2int_rn(float x) { return x == x ? static_cast<int>(std::nearbyint(x)) : 0; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline int atomicMax(int* at, int value) { return std::exchange(*at, std::max(*at, value)); }
struct float2 {
  float x, y;
};
struct uint2 {
  uint32_t x, y;
};
enum { __NV_SATFINITE, __NV_E4M3 };
// To the nearest of the finite values, ties to that of an even mantissa.
inline uint8_t to_e4m3(float value) {
  if (value != value) return 0x7f;
  const double size = std::min(std::fabs(double{value}), 448.0);
  const int exponent = size == 0 ? -6 : std::max(std::ilogb(size), -6);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 16 is the next exponent's 8
  const int bits = exponent == -6 && steps < 8 ? steps : (exponent + 7) * 8 + steps - 8;
  return static_cast<uint8_t>(bits | (std::signbit(value) ? 128 : 0));
}
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 two, int, int) {
  return static_cast<uint16_t>(to_e4m3(two.x) | to_e4m3(two.y) << 8);
}

namespace lamina {

// As csrc/include/fp8.cuh has them.
using Float8 = __nv_fp8_e4m3;
constexpr float kLargestFp8 = 448.0f;

}  // namespace lamina
