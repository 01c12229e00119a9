// Products of bfloat16 numbers two at a time, where the CPU multiplies and adds pairs of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm_microkernel.h"
#include "vector.h"

namespace lamina {

#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// sum + the products of the two bfloat16 numbers in each lane.
inline Vec add_pairs(Vec sum, Vec left, Vec right) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#else
  return sum + left + right;  // never called
#endif
}

// Rows of pairs; so is the left operand.
struct PairPanel : Panel {
  using Panel::Panel;
  static Vec left(const float* from) { return (Vec)(IntVec{} + bit_cast<int32_t>(*from)); }
  static Vec add(Vec sum, Vec left, Vec right) { return add_pairs(sum, left, right); }
};

// Its sums start at 0 and are added to what there was.
struct PairPanelAddedAtEnd : PairPanel {
  using PairPanel::PairPanel;
  static constexpr bool kAddsAtEnd = true;
};

// Scores of up to kRows queries by keys where they lie.
//
// A vector holds four pairs of each query. Beside it come four pairs of a key, the same in each quarter, which takes a
// load and no shuffle; so there are four sums a score, of pairs 0, 4, 8, ..., of 1, 5, 9, ..., and so on, added in
// order.
class FewQueries {
 public:
  static constexpr int kRows = 4, kSums = 4, kDims = 2 * kSums;  // dims that a vector holds
  static constexpr int kKeys = 8;                                // at once, so many that they hide how long a sum takes

  static size_t num_floats(int dim) { return static_cast<size_t>(kRows) * dim / 2; }

  static void pack(const BFloat16* const* rows, int count, int dim, float* to) {
    std::memset(to, 0, num_floats(dim) * sizeof(float));
    for (int r = 0; r < count; r++)
      for (int d = 0; d < dim; d += kDims)
        std::memcpy(to + (d / kDims * kRows + r) * kSums, rows[r] + d, kDims * sizeof(BFloat16));
  }

  // scores[row][stride] of kKeys keys.
  static void score(const float* query, const BFloat16* const* keys, int rows, int dim, float* scores, int stride) {
#if defined(__AVX512BF16__)
    Vec sums[kKeys] = {};
    const BFloat16* key[kKeys];
    for (int j = 0; j < kKeys; j++) key[j] = keys[j];
    for (int d = 0; d < dim; d += kDims) {
      const Vec left = load(query + d / kDims * kLanes);
      unrolled(std::make_integer_sequence<int, kKeys>(),
               [&](int j) { sums[j] = add_pairs(sums[j], left, four_times(key[j] + d)); });
    }
    unrolled(std::make_integer_sequence<int, kKeys / 4>(),
             [&](int j) { store_quarters((__m512)add_up(sums + 4 * j), rows, scores + 4 * j, stride); });
#endif
  }

 private:
#if defined(__AVX512BF16__)
  static Vec four_times(const BFloat16* from) {
    return (Vec)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static void store_quarters(__m512 x, int count, float* to, int stride) {
    _mm_storeu_ps(to, _mm512_castps512_ps128(x));
    if (count > 1) _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(x, 1));
    if (count > 2) _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(x, 2));
    if (count > 3) _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(x, 3));
  }

  // Of four keys: those of a query in a quarter, a key a lane.
  static Vec add_up(const Vec* sums) {
    const __m512 a = (__m512)sums[0], b = (__m512)sums[1], c = (__m512)sums[2], d = (__m512)sums[3];
    const __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
    const __m512d above_ab = (__m512d)_mm512_unpackhi_ps(a, b), above_cd = (__m512d)_mm512_unpackhi_ps(c, d);
    return (((Vec)_mm512_unpacklo_pd(ab, cd) + (Vec)_mm512_unpackhi_pd(ab, cd)) +
            (Vec)_mm512_unpacklo_pd(above_ab, above_cd)) +
           (Vec)_mm512_unpackhi_pd(above_ab, above_cd);
  }
#endif
};

}  // namespace lamina
