// int8 as keys and values are stored: a head of a token as whole numbers from -127 to 127 and their scale behind them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace lamina {

struct Int8 {
  int8_t number;
};

constexpr int64_t kInt8ScaleBytes = sizeof(float);

inline Vec load(const Int8* from) { return load(&from->number); }

inline float int8_scale(const Int8* row, int64_t dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof(scale));
  return scale;
}

// scale = largest / 127, number = x / scale rounded to nearest, ties to even; a row with a number that is not finite
// has a scale of NaN, one of zeros a scale of 0.
template <typename T>
inline void store_int8_row(Int8* to, const T* from, int64_t dim) {
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  Vec largest = {}, not_finite = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec x = load_some(from + d, dim - d);
    largest = max(largest, x < 0.0f ? -x : x);
    not_finite += x - x;
  }
  const float nan = reduce(not_finite, [](Vec a, Vec b) { return a + b; });
  const float scale = reduce(largest, [](Vec a, Vec b) { return max(a, b); }) / 127.0f + nan;
  const float divisor = scale > 0.0f ? scale : 1.0f;
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec x = load_some(from + d, dim - d) / divisor;
    const Vec bounded = x > 127.0f ? broadcast(127.0f) : (x < -127.0f ? broadcast(-127.0f) : x);
    const IntVec whole = bit_cast<IntVec>(bounded + kRound) - bit_cast<int32_t>(kRound);
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    std::memcpy(to + d, &narrow, std::min<int64_t>(dim - d, kLanes));
  }
  std::memcpy(to + dim, &scale, sizeof(scale));
}

// The numbers as numbers of T, each of which it is.
template <typename T>
inline void widen_row(T* to, const Int8* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load_some(from + i, count - i), count - i);
}

}  // namespace lamina
