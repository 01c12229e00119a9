// The two GEMMs of attention for rows of bfloat16, by AMX tiles.
//
// Few rows, as in decode, are the right operand of Q @ Kᵀ: keys are taken where they lie, sixteen at a time, and the
// results are transposed. Of many rows the keys are transposed, once for all. Either way scores are float32 sums of
// exact products. Probabilities are split into two bfloat16 numbers, which together hold 16 bits of them, so that P @ V
// is as exact as the scores; AMX is fast enough for both.
#pragma once

#include <initializer_list>

#include "amx.h"

namespace lamina {

#if defined(LAMINA_AMX)

class AmxAttention {
 public:
  using Scope = AmxScope;  // lives while score and multiply_values are called
  static constexpr int kRows = 64, kKeys = 64;

  static bool serves(int dim) { return dim % kTileDepth == 0 && has_amx(); }
  static size_t num_floats(int dim) { return (kRows * dim + 2 * kKeys * dim + 2 * kRows * kKeys) / 2; }

  AmxAttention(float* memory, int dim)
      : dim_(dim),
        query_(reinterpret_cast<BFloat16*>(memory)),
        keys_(query_ + kRows * dim),
        values_(keys_ + kKeys * dim),
        high_(values_ + kKeys * dim),
        low_(high_ + kRows * kKeys) {}

  // Few rows may begin at any multiple of 16, beside others.
  void load_query(const BFloat16* const* rows, int count, int first_row) {
    num_few_ = count <= kTileRows ? count : 0;
    if (num_few_ != 0) {
      for (int c = 0; c < dim_ / kTileDepth; c++)
        pack_tile(rows, count, c * kTileDepth, kTileDepth, query_ + first_row * dim_ + c * kTileElements);
      return;
    }
    groups_ = (count + 2 * kTileRows - 1) / (2 * kTileRows) * 2;
    for (int r = 0; r < count; r++) std::memcpy(query_ + r * dim_, rows[r], dim_ * sizeof(BFloat16));
  }

  // scores[row][kKeys] of key groups from .. to; others are undefined. Only few rows begin at another than 0.
  void score(const BFloat16* const* keys, int first_row, int from, int to, float* scores) {
    if (num_few_ != 0) return score_few(keys, first_row, from / kTileRows, (to + kTileRows - 1) / kTileRows, scores);
    const int chunks = dim_ / kTileDepth;
    for (int group = from / kTileRows; group * kTileRows < to; group++)
      for (int c = 0; c < chunks; c++)
        pack_tile(keys + group * kTileRows, kTileRows, c * kTileDepth, kTileDepth, key_tile(group, c));
    written();
    for (int group = 0; group < groups_; group++, scores += kTileRows * kKeys) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int c = 0; c < chunks; c++) {
        _tile_loadd(4, query_ + group * kTileRows * dim_ + c * kTileDepth, dim_ * 2);
        _tile_loadd(5, key_tile(0, c), 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, key_tile(1, c), 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, key_tile(2, c), 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, key_tile(3, c), 64);
        _tile_dpbf16ps(3, 4, 5);
      }
      _tile_stored(0, scores, kKeys * 4);
      _tile_stored(1, scores + kTileRows, kKeys * 4);
      _tile_stored(2, scores + 2 * kTileRows, kKeys * 4);
      _tile_stored(3, scores + 3 * kTileRows, kKeys * 4);
    }
  }

  // The probabilities of a row, for `multiply_values`.
  void set_weights(int row, int vector, Vec first, Vec second) {
    const __m512bh high = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    BFloat16* to = high_ + row * kKeys + vector * kLanes;
    std::memcpy(to, &high, sizeof(high));
    const __m512bh low = _mm512_cvtne2ps_pbh((__m512)(second - load(to + kLanes)), (__m512)(first - load(to)));
    std::memcpy(low_ + row * kKeys + vector * kLanes, &low, sizeof(low));
  }

  // out[row][dim] += weights @ values, over keys from .. to; out has rows for whole groups, two or one of few rows.
  void multiply_values(const BFloat16* const* values, int from, int to, float* out) {
    const int first = from / kTileDepth, last = (to + kTileDepth - 1) / kTileDepth;
    for (int chunk = first; chunk < last; chunk++)
      for (int pair = chunk * kTileRows; pair < (chunk + 1) * kTileRows; pair++) pack_values(values, pair, from, to);
    written();
    if (num_few_ != 0) {
      int d = 0;
      for (; d + 4 * kTileRows <= dim_; d += 4 * kTileRows) multiply_values_few<4>(d, first, last, out);
      if (d < dim_) multiply_values_few<2>(d, first, last, out);
      return;
    }
    for (int group = 0; group < groups_; group += 2)
      for (int d = 0; d < dim_; d += 2 * kTileRows) multiply_values_block(group, d, first, last, out);
  }

 private:
  static void written() { asm volatile("" ::: "memory"); }  // gcc does not know that tile loads read memory

  BFloat16* key_tile(int group, int chunk) { return keys_ + (group * (dim_ / kTileDepth) + chunk) * kTileElements; }

  void score_few(const BFloat16* const* keys, int first_row, int first, int last, float* scores) {
    written();
    const BFloat16* query = query_ + first_row * dim_;
    score_group<0>(keys, query, first, last);
    score_group<1>(keys, query, first, last);
    score_group<2>(keys, query, first, last);
    score_group<3>(keys, query, first, last);
    alignas(64) Vec sums[kKeys / kTileRows][kTileRows];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int group = first; group < last; group++) {
      transpose(sums[group]);
      for (int r = 0; r < num_few_; r++) store(scores + r * kKeys + group * kTileRows, sums[group][r]);
    }
  }

  // Scores [key][row] in the tile of the group's number.
  template <int group>
  void score_group(const BFloat16* const* keys, const BFloat16* query, int first, int last) {
    zero_tile<group>();
    if (group < first || group >= last) return;
    const BFloat16* const* rows = keys + group * kTileRows;
    const int64_t stride = rows[1] - rows[0];
    bool in_order = stride > 0;
    for (int r = 0; r < kTileRows; r++) in_order &= rows[r] == rows[0] + r * stride;
    BFloat16* copy = keys_ + group * kTileRows * dim_;
    if (!in_order) {  // of several blocks, or an end: there rows stand for others that are not attended
      for (int r = 0; r < kTileRows; r++) std::memcpy(copy + r * dim_, rows[r], dim_ * sizeof(BFloat16));
      written();
    }
    const BFloat16* from = in_order ? rows[0] : copy;
    const int64_t row_bytes = (in_order ? stride : dim_) * sizeof(BFloat16);
    for (int c = 0; c < dim_ / kTileDepth; c++) {
      load_tile<4 + group % 2>(from + c * kTileDepth, row_bytes);
      load_tile<6 + group % 2>(query + c * kTileElements, 64);
      multiply_tiles<group, 4 + group % 2, 6 + group % 2>();
    }
  }

  // One group of rows by `count` of dims.
  template <int count>
  void multiply_values_few(int d, int first, int last, float* out) {
    float* to = out + d;
    load_tile<0>(to, dim_ * 4);
    load_tile<1>(to + kTileRows, dim_ * 4);
    if (count == 4) load_tile<2>(to + 2 * kTileRows, dim_ * 4), load_tile<3>(to + 3 * kTileRows, dim_ * 4);
    for (int chunk = first; chunk < last; chunk++) {
      load_tile<4>(high_ + chunk * kTileDepth, kKeys * 2);
      load_tile<5>(low_ + chunk * kTileDepth, kKeys * 2);
      weigh_values<0>(chunk, d);
      weigh_values<1>(chunk, d);
      if (count == 4) weigh_values<2>(chunk, d), weigh_values<3>(chunk, d);
    }
    _tile_stored(0, to, dim_ * 4);
    _tile_stored(1, to + kTileRows, dim_ * 4);
    if (count == 4) {
      _tile_stored(2, to + 2 * kTileRows, dim_ * 4);
      _tile_stored(3, to + 3 * kTileRows, dim_ * 4);
    }
    written();
  }

  template <int tile>
  void weigh_values(int chunk, int d) {
    load_tile<6 + tile % 2>(value_row(chunk * kTileRows, d + tile * kTileRows), dim_ * 4);
    multiply_tiles<tile, 4, 6 + tile % 2>();
    multiply_tiles<tile, 5, 6 + tile % 2>();
  }

  // Two groups of rows by two of dims: four chains of multiply-adds, as many as hide how long one takes.
  void multiply_values_block(int group, int d, int first, int last, float* out) {
    float* above = out + group * kTileRows * dim_ + d;
    float* below = above + kTileRows * dim_;
    _tile_loadd(0, above, dim_ * 4);
    _tile_loadd(1, above + kTileRows, dim_ * 4);
    _tile_loadd(2, below, dim_ * 4);
    _tile_loadd(3, below + kTileRows, dim_ * 4);
    for (int chunk = first; chunk < last; chunk++) {
      _tile_loadd(6, value_row(chunk * kTileRows, d), dim_ * 4);
      _tile_loadd(7, value_row(chunk * kTileRows, d + kTileRows), dim_ * 4);
      for (const BFloat16* part : {high_, low_}) {
        const BFloat16* weights = part + group * kTileRows * kKeys + chunk * kTileDepth;
        _tile_loadd(4, weights, kKeys * 2);
        _tile_loadd(5, weights + kTileRows * kKeys, kKeys * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, above, dim_ * 4);
    _tile_stored(1, above + kTileRows, dim_ * 4);
    _tile_stored(2, below, dim_ * 4);
    _tile_stored(3, below + kTileRows, dim_ * 4);
  }

  // Elements of two keys, interleaved.
  BFloat16* value_row(int pair, int d) { return values_ + 2 * (pair * dim_ + d); }

  // A key that is not attended may hold anything; its probability is 0, and 0 times anything has to be 0.
  void pack_values(const BFloat16* const* values, int pair, int from, int to) {
    const int key = 2 * pair;
    for (int d = 0; d < dim_; d += kTileDepth) {
      const __m512i even = load_value(values[key], d, key >= from && key < to);
      const __m512i odd = load_value(values[key + 1], d, key + 1 >= from && key + 1 < to);
      _mm512_storeu_si512(value_row(pair, d), _mm512_permutex2var_epi16(even, interleaved(0), odd));
      _mm512_storeu_si512(value_row(pair, d + kTileRows), _mm512_permutex2var_epi16(even, interleaved(16), odd));
    }
  }

  static __m512i load_value(const BFloat16* row, int d, bool is_attended) {
    return is_attended ? _mm512_loadu_si512(row + d) : _mm512_setzero_si512();
  }

  // Lanes 2l and 2l + 1 of the result are lane from + l of either operand.
  static __m512i interleaved(int from) {
    const BitVec lane = (BitVec)lane_ids() + static_cast<uint32_t>(from);
    return (__m512i)(lane | ((lane + 32) << 16));
  }

  const int dim_;
  int groups_ = 0;
  int num_few_ = 0;  // rows where they are few; else 0
  BFloat16* const query_;
  BFloat16* const keys_;
  BFloat16* const values_;
  BFloat16* const high_;
  BFloat16* const low_;
};

#else

class AmxAttention {
 public:
  struct Scope {};
  static bool serves(int) { return false; }
  static size_t num_floats(int) { return 0; }
  AmxAttention(float*, int) {}
  void load_query(const BFloat16* const*, int, int) {}
  void score(const BFloat16* const*, int, int, int, float*) {}
  void set_weights(int, int, Vec, Vec) {}
  void multiply_values(const BFloat16* const*, int, int, float*) {}
};

#endif

}  // namespace lamina
