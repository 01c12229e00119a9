// Four-bit weights: sixteen values of which each lane takes one, and how they meet x in pairs of columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rounding.h"
#include "vector.h"

namespace lamina {

template <typename T>
inline float to_float(T value) {
  return load_some(&value, 1)[0];
}

template <typename T>
inline void store_one(T* to, float value) {
  store_some(to, broadcast(value), 1);
}

// Sixteen values; each lane gets the one that the lowest four bits of its index say.
class Table {
 public:
  explicit Table(const float* values) {
    for (int i = 0; i < 16 / kLanes; i++) parts_[i] = load(values + i * kLanes);
  }

  Vec operator[](IntVec index) const {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)index, (__m512)parts_[0]);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)parts_[0], (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)parts_[1], (__m256i)index);
    return (Vec)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)index, 28)));
#else
    Vec found = {};
    for (int i = 0; i < kLanes; i++) found[i] = parts_[(index[i] & 15) / kLanes][index[i] % kLanes];
    return found;
#endif
  }

 private:
  Vec parts_[16 / kLanes];
};

// Weights of even columns and of the odd ones behind them times x, which is packed in steps of two vectors.
template <typename T>
struct PairOps {
  using Packed = float;
  static constexpr int kStep = 2 * kLanes;

  // The first `count` elements of a step, none if there are none: the even ones, then the odd ones.
  static void pack(const T* from, int64_t count, float* to) {
    T some[kStep] = {};
    std::memcpy(some, from, std::clamp<int64_t>(count, 0, kStep) * sizeof(T));
    alignas(64) float wide[kStep];
    store(wide, load(some));
    store(wide + kLanes, load(some + kLanes));
    for (int i = 0; i < kLanes; i++) to[i] = wide[2 * i], to[kLanes + i] = wide[2 * i + 1];
  }

  static Vec multiply_add(Vec sum, Vec even, Vec odd, const float* x) {
    return sum + even * load(x) + odd * load(x + kLanes);
  }
};

// Two neighbours of bfloat16 in a lane, of values that it holds exactly.
inline Vec paired(const BFloat16*, Vec even, Vec odd) {
  return bit_cast<Vec>(bit_cast<BitVec>(even) >> 16 | bit_cast<BitVec>(odd));
}

#if defined(__AVX512BF16__)
template <>
struct PairOps<BFloat16> {
  using Packed = BFloat16;
  static constexpr int kStep = 2 * kLanes;

  static void pack(const BFloat16* from, int64_t count, BFloat16* to) {
    const Vec pairs = load_pairs(from, std::max<int64_t>(count, 0));
    std::memcpy(to, &pairs, sizeof(pairs));
  }

  static Vec multiply_add(Vec sum, Vec even, Vec odd, const BFloat16* x) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)paired(x, even, odd));
  }
};
#endif

// The first `count` of a step's columns, as they lie in a row.
template <typename T>
inline void store_pairs(T* to, Vec even, Vec odd, int64_t count) {
  T narrow[2][kLanes], pairs[2 * kLanes];
  store(narrow[0], even);
  store(narrow[1], odd);
  for (int i = 0; i < kLanes; i++) pairs[2 * i] = narrow[0][i], pairs[2 * i + 1] = narrow[1][i];
  std::memcpy(to, pairs, std::min<int64_t>(count, 2 * kLanes) * sizeof(T));
}

template <>
inline void store_pairs(BFloat16* to, Vec even, Vec odd, int64_t count) {
  const Vec pairs = paired(to, even, odd);
  std::memcpy(to, &pairs, std::min<int64_t>(count, 2 * kLanes) * sizeof(BFloat16));
}

}  // namespace lamina
