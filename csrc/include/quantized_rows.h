// Rows of x as whole numbers from -127 to 127, a scale for each 32 columns of a row: what blocks of weights meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lamina {

constexpr int kSpan = 32;  // columns with one scale

// 32 columns of a row.
struct alignas(16) QuantizedSpan {
  int8_t values[kSpan];
  int32_t totals[2];   // of the values, by halves
  float scale;         // x is about value * scale; NaN where a column is not finite
  float scaled_total;  // scale * (the sum of both totals)
};

constexpr float kTiny = 7.5231638e-37f;  // 2^-120: 127 by less would be infinite

namespace detail {

// To the nearest whole number, ties to even, for sizes below 2^22; what x was multiplied from is rounded before.
inline IntVec to_nearest(Vec x) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
  return (IntVec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__aarch64__)
  return bit_cast<IntVec>(vcvtnq_s32_f32(bit_cast<float32x4_t>(x)));
#else
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  return bit_cast<IntVec>(x + kRound) - bit_cast<int32_t>(kRound);
#endif
}

}  // namespace detail

// scale = largest / 127; value = x * (127 / largest), rounded to nearest even; all are 0 where the largest is
// below 2^-120. Columns beyond `count` are zeros.
template <typename T>
inline void quantize_span(const T* from, int64_t count, QuantizedSpan* to) {
  constexpr int kVectors = kSpan / kLanes;
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  Vec x[kVectors], largest = {}, not_finite = {};
  for (int v = 0; v < kVectors; v++) {
    x[v] = load_some(from + v * kLanes, std::max<int64_t>(0, count - v * kLanes));
    const Vec size = x[v] < 0.0f ? -x[v] : x[v];
    largest = max(largest, size);
    not_finite += x[v] - x[v];
  }
  const float peak = reduce(largest, [](Vec a, Vec b) { return max(a, b); });
  const float nan = reduce(not_finite, [](Vec a, Vec b) { return a + b; });
  const float inverse = peak >= kTiny ? 127.0f / peak : 0.0f;
  IntVec sums[2] = {};
  for (int v = 0; v < kVectors; v++) {
    const IntVec whole = detail::to_nearest(x[v] * inverse);
    sums[2 * v / kVectors] += whole;
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    std::memcpy(to->values + v * kLanes, &narrow, sizeof(narrow));
  }
  for (int h = 0; h < 2; h++) {
    to->totals[h] = 0;
    for (int l = 0; l < kLanes; l++) to->totals[h] += sums[h][l];
  }
  to->scale = peak / 127.0f + nan;
  to->scaled_total = to->scale * static_cast<float>(to->totals[0] + to->totals[1]);
}

}  // namespace lamina
