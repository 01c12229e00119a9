// FP8 (e4m3: a sign, four bits of exponent of bias 7, three of mantissa; no infinity): to floats and back.
#pragma once

#include "vector.h"

namespace lamina {

// At most 448.
struct Float8 {
  uint8_t bits;
};
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// No step is a subnormal float, which a process may flush to zero.
inline Vec load(const Float8* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const BitVec byte = __builtin_convertvector(bytes, BitVec), size = byte & 0x7f;
  const Vec normal = bit_cast<Vec>((size << 20) + (120u << 23));
  const Vec subnormal = __builtin_convertvector((IntVec)size, Vec) * (1.0f / 512);
  const Vec number = size < 8 ? subnormal : (size == 0x7f ? broadcast(0.0f) / 0.0f : normal);
  return bit_cast<Vec>(bit_cast<BitVec>(number) | (byte & 0x80) << 24);
}

// Rounds to nearest, ties to even; what is beyond the largest becomes it, a NaN stays a NaN.
inline void store(Float8* to, Vec x) {
  const BitVec sign = bit_cast<BitVec>(x) >> 24 & 0x80;
  const Vec size = bit_cast<Vec>(bit_cast<BitVec>(x) & 0x7fffffffu), most = size > 448.0f ? broadcast(448.0f) : size;
  const BitVec bits = bit_cast<BitVec>(most);
  const BitVec normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
  // in units of 2^-9, which are those of a float from 2^14 on
  const BitVec subnormal = bit_cast<BitVec>(most + 16384.0f) - (141u << 23);
  const BitVec byte = x == x ? (most < 1.0f / 64 ? subnormal : normal) | sign : BitVec{} + 0x7f;
  const Bytes bytes = __builtin_convertvector(byte, Bytes);
  std::memcpy(to, &bytes, sizeof(bytes));
}

// Numbers of T, divided by the scale and rounded to FP8.
template <typename T>
inline void narrow_row(Float8* to, const T* from, float scale, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load_some(from + i, count - i) / scale, count - i);
}

// FP8 as numbers of T, each of which it is.
template <typename T>
inline void widen_row(T* to, const Float8* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load_some(from + i, count - i), count - i);
}

}  // namespace lamina
