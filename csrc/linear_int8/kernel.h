// out = round((x @ weight.T) * scale + bias): weights of one byte, turned into floats in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "vector.h"

namespace lamina {

constexpr int kGroup = 16;  // weight rows that are worked on together, and that threads share out

template <typename T>
struct LinearInt8 {
  const T* x;            // [num_tokens, k], rows x_stride apart
  const int8_t* weight;  // [n, k]
  const float* scale;    // [n]
  const T* bias;         // [n] or null
  T* out;                // [num_tokens, n]
  int64_t x_stride, num_tokens, n, k;

  int64_t num_groups() const { return (n + kGroup - 1) / kGroup; }
  int64_t rows(int64_t group) const { return std::min<int64_t>(kGroup, n - group * kGroup); }

  // Writes a token's sums of the rows of a group, as many lanes as there are rows.
  void finish(const float* sums, int64_t token, int64_t group) const {
    const int64_t first = group * kGroup, count = rows(group);
    for (int64_t lane = 0; lane < count; lane += kLanes) {
      const int64_t row = first + lane, left = count - lane;
      Vec value = load(sums + lane) * load_some(scale + row, left);
      if (bias != nullptr) value += load_some(bias + row, left);
      store_some(out + token * n + row, value, left);
    }
  }
};

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}

inline Vec load_some(const int8_t* from, int64_t count) {
  int8_t padded[kLanes] = {};
  std::memcpy(padded, from, count);
  return load(padded);
}

// Sums in float32 on any machine and for any type of x.
namespace plain {

constexpr int kRows = 4, kTokens = 4;

inline int64_t padded(int64_t k) { return (k + kLanes - 1) / kLanes * kLanes; }

// A token as floats, with zeros up to whole vectors.
template <typename T>
void widen(const LinearInt8<T>& a, int64_t token, float* to) {
  for (int64_t i = 0; i < a.k; i += kLanes) store(to + i, load_some(a.x + token * a.x_stride + i, a.k - i));
}

template <int tokens>
void dot(const int8_t* const* rows, const float* x, int64_t k, float* sums /* [tokens][kGroup] */) {
  Vec sum[kRows][tokens] = {};
  const int64_t stride = padded(k);
  const auto step = [&](int64_t i, auto weights) {
    for (int r = 0; r < kRows; r++) {
      const Vec weight = weights(rows[r] + i);
      for (int t = 0; t < tokens; t++) sum[r][t] += weight * load(x + t * stride + i);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) step(i, [](const int8_t* from) { return load(from); });
  if (i < k) step(i, [&](const int8_t* from) { return load_some(from, k - i); });
  for (int r = 0; r < kRows; r++)
    for (int t = 0; t < tokens; t++) sums[t * kGroup + r] = reduce(sum[r][t], [](Vec a, Vec b) { return a + b; });
}

// All tokens, widened before, by the rows of one group.
template <typename T>
void multiply_group(const LinearInt8<T>& a, const float* x, int64_t group) {
  float sums[kTokens * kGroup] = {};
  for (int64_t token = 0; token < a.num_tokens; token += kTokens) {
    const int tokens = static_cast<int>(std::min<int64_t>(kTokens, a.num_tokens - token));
    for (int first = 0; first < kGroup; first += kRows) {
      const int8_t* rows[kRows];
      for (int r = 0; r < kRows; r++) rows[r] = a.weight + std::min(group * kGroup + first + r, a.n - 1) * a.k;
      const float* from = x + token * padded(a.k);
      float* to = sums + first;
      if (tokens == 1) dot<1>(rows, from, a.k, to);
      if (tokens == 2) dot<2>(rows, from, a.k, to);
      if (tokens == 3) dot<3>(rows, from, a.k, to);
      if (tokens == 4) dot<4>(rows, from, a.k, to);
    }
    for (int t = 0; t < tokens; t++) a.finish(sums + t * kGroup, token + t, group);
  }
}

}  // namespace plain
}  // namespace lamina
