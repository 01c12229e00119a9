// What a call of paged attention asks for, and what some keys come to for some rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8.h"
#include "int8_cache.h"
#include "vector.h"

namespace lamina {

constexpr int kMaxRows = 64;
constexpr int kTileKeys = 64;
constexpr int kMaxRowsInParts = 16;  // a tile of few rows may be attended split by split
constexpr int kSplitKeys = 256;

// How keys and values are stored: as queries are, in FP8, or in int8 with a scale behind each head of a token.
enum class Stored : int64_t { kSame, kFp8, kInt8 };

// Keys first .. last - 1 of a sequence.
struct Keys {
  int64_t first, last;
};

// Some rows of one sequence: row r is query head r % group of token r / group.
struct Tile {
  int seq, first_row, rows;
};

// Some key-value heads of a split of a tile.
struct Heads {
  Tile tile;
  int first, last, split;
};

struct Strides {
  int64_t outer, token, head;  // outer: of a block; 0 where there are none
};

template <typename T>
struct Attention {
  T* out;
  const T* query;
  const void *key_cache, *value_cache;  // of T, Float8 or Int8
  const int32_t *block_tables, *seq_lens, *query_start_loc;
  Strides out_strides, query_strides, key_strides, value_strides;
  int64_t block_tables_stride;
  int64_t num_seqs, num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int64_t window;  // < 0: none
  int64_t chunk;   // < 0: none
  float soft_cap;  // 0: none
  Stored stored;
  float value_scale;  // what values are multiplied by

  // Bytes of a number, and of a head of a token.
  int64_t cached_size() const { return stored == Stored::kSame ? sizeof(T) : 1; }
  int64_t head_bytes() const { return head_dim * cached_size() + (stored == Stored::kInt8 ? kInt8ScaleBytes : 0); }
  int group() const { return static_cast<int>(num_heads / num_kv_heads); }
  int padded_dim() const { return static_cast<int>((head_dim + kLanes - 1) / kLanes * kLanes); }
  int query_len(int seq) const { return query_start_loc[seq + 1] - query_start_loc[seq]; }
  int64_t position(const Tile& tile, int row) const {
    return seq_lens[tile.seq] - query_len(tile.seq) + (tile.first_row + row) / group();
  }
  // The keys of a split that some row of a tile sees.
  Keys keys_of(const Tile& tile, int split) const {
    const int64_t start = static_cast<int64_t>(split) * kSplitKeys;
    return {std::max(start, oldest(position(tile, 0))),
            std::min(start + kSplitKeys, position(tile, tile.rows - 1) + 1)};
  }
  // The first key that a query sees.
  int64_t oldest(int64_t position) const {
    return std::max(window < 0 ? 0 : std::max<int64_t>(0, position - window + 1),
                    chunk < 0 ? 0 : position - position % chunk);
  }
};

// The unnormalised result of some keys for some rows.
struct Partial {
  float *out, *max, *sum;  // [rows][padded_dim], [rows], [rows]

  static size_t size(int rows, int padded_dim) { return (static_cast<size_t>(rows) * (padded_dim + 2) + 15) / 16 * 16; }
  Partial(float* memory, int rows, int padded_dim)
      : out(memory), max(memory + static_cast<size_t>(rows) * padded_dim), sum(max + rows) {}

  // Its rows from `row` on.
  Partial from(int row, int padded_dim) const {
    Partial rest = *this;
    rest.out += static_cast<size_t>(row) * padded_dim, rest.max += row, rest.sum += row;
    return rest;
  }

  void copy(const Partial& from, int rows, int padded_dim) {
    std::copy(from.out, from.out + static_cast<size_t>(rows) * padded_dim, out);
    std::copy(from.max, from.max + rows, max);
    std::copy(from.sum, from.sum + rows, sum);
  }

  void clear(int rows, int padded_dim) {
    std::fill(out, out + static_cast<size_t>(rows) * padded_dim, 0.0f);
    std::fill(max, max + rows, -kInfinity);
    std::fill(sum, sum + rows, 0.0f);
  }
};

// What to subtract from scores in the exponent: their maximum, or 0 where no key has been seen.
inline float exponent_base(float max) { return max == -kInfinity ? 0.0f : max; }

inline float exp2_scalar(float x) { return exp2(broadcast(x))[0]; }

inline void merge(Partial& total, const Partial& part, int rows, int padded_dim) {
  for (int r = 0; r < rows; r++) {
    float max = std::max(total.max[r], part.max[r]);
    float keep = exp2_scalar(total.max[r] - exponent_base(max));
    float add = exp2_scalar(part.max[r] - exponent_base(max));
    float *to = total.out + r * padded_dim, *from = part.out + r * padded_dim;
    for (int d = 0; d < padded_dim; d += kLanes) store(to + d, load(to + d) * keep + load(from + d) * add);
    total.sum[r] = total.sum[r] * keep + part.sum[r] * add;
    total.max[r] = max;
  }
}

}  // namespace lamina
