// Q @ Kᵀ of a tile of keys without AMX: keys are packed so that the lanes of a vector stand for as many keys.
//
// A lane holds a float of each key, two bfloat16 numbers where the CPU multiplies pairs of them, or four of int8. Every
// score is one chain over the dims, so that its bits do not depend on how many rows there are. For a few queries whose
// pairs are multiplied keys are not packed: that would take longer than the scores. Their scores are four chains then,
// and so are those of many queries.
#pragma once

#include <cstdint>
#include <type_traits>

#include "byte_dot.h"
#include "call.h"
#include "gemm_microkernel.h"
#include "int8_cache.h"
#include "pairs.h"
#include "prefetch.h"
#include "vector.h"

namespace lamina {

// Keys as four bytes a lane, 128 added to each; the left operand has signed bytes, sums are whole numbers.
struct BytePanel : Panel {
  using Panel::Panel;
  static Vec left(const float* from) { return (Vec)(IntVec{} + bit_cast<int32_t>(*from)); }
  static Vec add(Vec sum, Vec left, Vec right) {
    return (Vec)add_dots<true>((IntVec)sum, (ByteVec)right, (IntVec)left);
  }
};

template <typename T>
class Scores {
 public:
  static constexpr bool kByPairs = kMultipliesPairs && std::is_same_v<T, BFloat16>;
  // Rows of 16 bits are made whole numbers of 16 bits beside keys of int8, floats are not.
  static constexpr bool kByBytes = sizeof(T) == 2;

  static size_t num_floats(int padded_dim) {
    const size_t few = kByPairs ? kMaxRows * FewQueries::num_floats(padded_dim) : 0;
    return static_cast<size_t>(kTileKeys + kMaxRows) * padded_dim + 2 * kMaxRows * kTileKeys + few;
  }

  Scores(float* memory, int dim, int padded_dim, bool is_int8)
      : dim_(dim),
        padded_dim_(padded_dim),
        in_bytes_(kByBytes && is_int8),
        in_fours_(kByPairs && !is_int8 && dim % FewQueries::kDims == 0),
        keys_(memory),
        query_(keys_ + static_cast<size_t>(kTileKeys) * padded_dim),
        dots_(query_ + static_cast<size_t>(kMaxRows) * padded_dim),
        few_(dots_ + 2 * kMaxRows * kTileKeys) {}

  // How many rows have scores of keys where they lie.
  int most_few() const { return in_fours_ ? FewQueries::kRows : 0; }

  // As rows first_row .. first_row + count - 1 of those that are held.
  void load_query(const T* const* rows, int count, int first_row) {
    if constexpr (kByPairs)
      if (takes_few(count)) return FewQueries::pack(rows, count, dim_, few(first_row));
    for (int r = 0; r < count; r++) {
      float* to = query_ + static_cast<size_t>(first_row + r) * padded_dim_;
      if (in_bytes_) {
        load_bytes_of(rows[r], first_row + r, reinterpret_cast<int8_t*>(to));
      } else if (in_fours_) {
        load_fours(rows[r], to);
      } else if constexpr (kByPairs) {
        to[dim_ / 2] = 0.0f;  // where dims are odd, beside the last
        std::memcpy(to, rows[r], dim_ * sizeof(T));
      } else {
        for (int d = 0; d < dim_; d += kLanes) store(to + d, load_some(rows[r] + d, dim_ - d));
      }
    }
  }

  // scores[row][kTileKeys] of rows from first_row on and keys from .. to, to whole vectors; others are undefined.
  void score(const T* const* keys, int rows, int first_row, int from, int to, float* scores, KvPrefetch<T>& prefetch) {
    if constexpr (kByPairs)
      if (takes_few(rows)) return score_few(keys, rows, few(first_row), from, to, scores, prefetch);
    pack(keys, from, to, prefetch);
    const int vectors = (to + kLanes - 1) / kLanes;
    const float* query = query_ + static_cast<size_t>(first_row) * padded_dim_;
    if (in_fours_) return score_fours(query, rows, vectors, scores, prefetch);
    using Keys = std::conditional_t<kByPairs, PairPanel, Panel>;
    constexpr int in_lane = kByPairs ? 2 : 1;
    const int depth = (dim_ + in_lane - 1) / in_lane;
    for (int first = 0, some; first < depth; first += some) {
      some = rows > kMaxRowsInParts ? depth : std::min(depth - first, KvPrefetch<T>::kScoreDims / in_lane);
      prefetch.step_score(rows);
      const Keys right(keys_ + first * kTileKeys, kTileKeys);
      if (first == 0)
        gemm<false>(rows, vectors, some, query, padded_dim_, right, scores, kTileKeys);
      else
        gemm<true>(rows, vectors, some, query + first, padded_dim_, right, scores, kTileKeys);
    }
  }

  // The same of int8, by the scales of the keys.
  void score(const Int8* const* keys, const float* key_scales, int rows, int first_row, int from, int to, float* scores,
             KvPrefetch<T>& prefetch) {
    pack(keys, from, to, prefetch);
    const int vectors = (to + kLanes - 1) / kLanes;
    const float* query = query_ + static_cast<size_t>(first_row) * padded_dim_;
    prefetch.step_scores(rows);
    if (in_bytes_) return score_bytes(query, first_row, key_scales, rows, vectors, scores);
    gemm<false>(rows, vectors, dim_, query, padded_dim_, Panel(keys_, kTileKeys), scores, kTileKeys);
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < vectors * kLanes; j += kLanes)
        store(scores + r * kTileKeys + j, load(scores + r * kTileKeys + j) * load(key_scales + j));
  }

 private:
  bool takes_few(int rows) const { return rows <= most_few(); }
  float* few(int first_row) const { return few_ + first_row * FewQueries::num_floats(padded_dim_); }

  void score_few(const BFloat16* const* keys, int rows, const float* query, int from, int to, float* scores,
                 KvPrefetch<T>& prefetch) {
    static_assert(FewQueries::kKeys == KvPrefetch<T>::kFewKeys, "a step for each");
    for (int j = from / kLanes * kLanes; j < to; j += FewQueries::kKeys) {
      prefetch.step_few();
      FewQueries::score(query, keys + j, rows, dim_, scores + j, kTileKeys);
    }
  }

  // As FewQueries adds up: pairs 0, 4, 8, ... first, then 1, 5, 9, ...
  void score_fours(const float* query, int rows, int vectors, float* scores, KvPrefetch<T>& prefetch) {
    constexpr int sums = FewQueries::kSums;
    const int depth = dim_ / FewQueries::kDims;
    for (int i = 0; i < sums; i++, query += depth) {
      prefetch.step_quarter_of_scores(rows);
      const PairPanelAddedAtEnd right(keys_ + i * kTileKeys, sums * kTileKeys);
      if (i == 0)
        gemm<false>(rows, vectors, depth, query, padded_dim_, right, scores, kTileKeys);
      else
        gemm<true>(rows, vectors, depth, query, padded_dim_, right, scores, kTileKeys);
    }
  }

  // The pairs of a row in the order in which score_fours takes them.
  void load_fours(const T* row, float* to) const {
    constexpr int sums = FewQueries::kSums;
    const int pairs = dim_ / 2;
    for (int i = 0; i < pairs; i++) std::memcpy(to + i % sums * (pairs / sums) + i / sums, row + 2 * i, sizeof(float));
  }

  // x is about scale * (256 * high + low), of which `to` gets all high, then, padded_dim bytes later, all low numbers.
  void load_bytes_of(const T* row, int r, int8_t* to) {
    constexpr int kLargest = 127 * 256 + 127;
    Vec most = {}, not_finite = {};
    for (int d = 0; d < dim_; d += kLanes) {
      const Vec x = load_some(row + d, dim_ - d);
      most = max(most, x < 0.0f ? -x : x);
      not_finite += x - x;
    }
    const float largest = reduce(most, [](Vec a, Vec b) { return max(a, b); });
    const float inverse = largest > 1e-30f ? kLargest / largest : 0.0f;
    query_scales_[r] = largest / kLargest + reduce(not_finite, [](Vec a, Vec b) { return a + b; });
    int8_t* low = to + padded_dim_;
    IntVec sums = {};
    for (int d = 0; d < padded_dim_; d += kLanes) {
      constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
      const Vec x = load_some(row + d, std::max(0, dim_ - d)) * inverse;
      const IntVec whole = bit_cast<IntVec>(x + kRound) - bit_cast<int32_t>(kRound), upper = (whole + 128) >> 8;
      store_narrow(to + d, upper);
      store_narrow(low + d, whole - upper * 256);
      sums += whole;
    }
    int32_t sum = 0;
    for (int l = 0; l < kLanes; l++) sum += sums[l];
    offsets_[r] = -128 * sum;
  }

  static void store_narrow(int8_t* to, IntVec whole) {
    typedef int8_t Narrow __attribute__((vector_size(kLanes)));
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    std::memcpy(to, &narrow, sizeof(narrow));
  }

  void score_bytes(const float* query, int first_row, const float* key_scales, int rows, int vectors, float* scores) {
    const int stride = padded_dim_, quads = (dim_ + 3) / 4;
    const BytePanel panel(keys_, kTileKeys);
    float *high = dots_, *low = dots_ + static_cast<size_t>(kMaxRows) * kTileKeys;
    gemm<false>(rows, vectors, quads, query, stride, panel, high, kTileKeys);
    gemm<false>(rows, vectors, quads, query + padded_dim_ / 4, stride, panel, low, kTileKeys);
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < vectors * kLanes; j += kLanes) {
        const int at = r * kTileKeys + j;
        const IntVec sum = ((IntVec)load(high + at) << 8) + (IntVec)load(low + at) + offsets_[first_row + r];
        store(scores + at, __builtin_convertvector(sum, Vec) * query_scales_[first_row + r] * load(key_scales + j));
      }
  }

  // keys_[element][key], an element a float, a pair or four bytes.
  template <typename Key>
  void pack(const Key* const* keys, int from, int to, KvPrefetch<T>& prefetch) {
    for (int group = from / kLanes * kLanes; group < to; group += kLanes) {
      int d = 0;
      for (; d + kPacked<Key> <= dim_; d += kPacked<Key>) {
        prefetch.step_pack();
        pack_block(keys + group, d, kPacked<Key>, keys_ + group);
      }
      if (d < dim_) pack_block(keys + group, d, dim_ - d, keys_ + group);
    }
  }

  template <typename Key>
  static constexpr int kPacked = kLanes * (sizeof(Key) == 2 || (sizeof(Key) == 1 && kByBytes) ? 4 / sizeof(Key) : 1);

  static inline __attribute__((always_inline)) void pack_block(const Int8* const* rows, int d, int count, float* to) {
    Vec block[kLanes];
    for (int i = 0; i < kLanes; i++)
      block[i] =
          kByBytes ? (Vec)((BitVec)load_four_bytes(rows[i] + d, count) ^ 0x80808080u) : load_some(rows[i] + d, count);
    transpose(block);
    constexpr int in_lane = kByBytes ? 4 : 1;
    to += d / in_lane * kTileKeys;
    for (int i = 0; i * in_lane < count; i++) store(to + i * kTileKeys, block[i]);
  }

  static inline __attribute__((always_inline)) void pack_block(const T* const* rows, int d, int count, float* to) {
    Vec block[kLanes];
    if constexpr (sizeof(T) == 4) {
      for (int i = 0; i < kLanes; i++) block[i] = load_some(rows[i] + d, count);
      transpose(block);
      for (int i = 0; i < kLanes; i++) store(to + (d + i) * kTileKeys, block[i]);
    } else {
      for (int i = 0; i < kLanes; i++) block[i] = load_two_bytes(rows[i] + d, count);
      transpose(block);
      to += (kByPairs ? d / 2 : d) * kTileKeys;
      for (int i = 0; 2 * i < count; i++) store_pairs(rows[0], block[i], i, count - 2 * i, to);
    }
  }

  static inline void store_pairs(const T* like, Vec pairs, int pair, int count, float* to) {
    if constexpr (kByPairs) {
      store(to + pair * kTileKeys, pairs);
    } else {
      Vec even, odd;
      split(like, pairs, even, odd);
      store(to + 2 * pair * kTileKeys, even);
      if (count > 1) store(to + (2 * pair + 1) * kTileKeys, odd);
    }
  }

  static Vec load_two_bytes(const T* from, int count) { return load_pairs(from, count); }

  static Vec load_four_bytes(const Int8* from, int count) {
    Vec four = {};
    std::memcpy(&four, from, std::min(count, 4 * kLanes));
    return four;
  }

  const int dim_, padded_dim_;
  const bool in_bytes_;
  const bool in_fours_;  // whether four sums make a score, as FewQueries has it
  float *const keys_, *const query_, *const dots_, *const few_;
  float query_scales_[kMaxRows];
  int32_t offsets_[kMaxRows];  // for the 128 in keys
};

}  // namespace lamina
