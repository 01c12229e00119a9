// e4m3 values, widened to float.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace lamina {

// A sign, four bits of exponent (bias 7), three of mantissa; no infinities.
struct Float8 {
  uint8_t bits;
};

// Exponent and mantissa lie in a float where its own do, 2^120 too small; subnormal ones alike. 0x7f is NaN.
inline Vec load(const Float8* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const Words words = __builtin_convertvector(bytes, Words), size = words & 0x7f;
  const Words finite = size << 20, nan = (Words)(size == 0x7f) & 0x7fc00000u;
  const Vec value = (Vec)finite * 0x1p120f;
  return (Vec)((Words)value | (words & 0x80) << 24 | nan);
}

}  // namespace lamina
