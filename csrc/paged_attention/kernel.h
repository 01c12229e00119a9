// Causal attention over a paged KV cache on a CPU: online softmax around two small GEMMs.
//
// The rows of a tile are the queries of one key-value head: its query heads times some tokens. For each tile of keys,
// keys are packed transposed and values as rows, as floats or for AMX, so that K and V are read once for all rows.
// Softmax is online within a split of kSplitKeys keys; splits start at fixed positions and are merged in order. So a
// row's bits depend on its own sequence alone: not on its neighbours, on chunks of a prompt, or on how many threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "amx_attention.h"
#include "buffer.h"
#include "call.h"
#include "gemm_microkernel.h"
#include "prefetch.h"
#include "scores.h"
#include "vector.h"

namespace lamina {

template <typename T>
class Worker {
 public:
  Worker(const Attention<T>& attention, Buffer& buffer)
      : attention_(attention),
        group_(attention.group()),
        dim_(static_cast<int>(attention.head_dim)),
        padded_dim_(attention.padded_dim()),
        factor_((attention.soft_cap > 0 ? 1 / attention.soft_cap : kLog2E) * attention.scale),
        splits_values_(kSplitsValues && attention.stored != Stored::kInt8 && dim_ % (2 * kLanes) == 0 && !by_amx()),
        panel_(static_cast<size_t>(kTileKeys) * padded_dim_),
        partial_(Partial::size(kMaxRows, padded_dim_)),
        values_(buffer.reserve(panel_ + kMaxRows * kTileKeys + 2 * partial_ + Scores<T>::num_floats(padded_dim_) +
                               AmxAttention::num_floats(padded_dim_) +
                               (attention.stored == Stored::kSame ? 0 : 2 * panel_))),
        scores_(values_ + panel_),
        total_(scores_ + kMaxRows * kTileKeys),
        part_(total_ + partial_),
        by_vectors_(part_ + partial_, dim_, padded_dim_, attention.stored == Stored::kInt8),
        prefetch_(attention, by_amx() ? 0 : by_vectors_.most_few()),
        amx_(part_ + partial_ + Scores<T>::num_floats(padded_dim_), dim_),
        wide_(reinterpret_cast<T*>(part_ + partial_ + Scores<T>::num_floats(padded_dim_) +
                                   AmxAttention::num_floats(padded_dim_))) {}

  // Whether AMX does the GEMMs; then an AmxAttention::Scope has to live meanwhile.
  bool by_amx() const { return by_amx(dim_); }

  // All splits of a tile, written to `out`.
  void finish(const Tile& tile, int kv_head, int first_split, int last_split) {
    if constexpr (std::is_same_v<T, BFloat16>)
      if (by_amx()) return finish_with<true>(tile, kv_head, first_split, last_split);
    finish_with<false>(tile, kv_head, first_split, last_split);
  }

  // How many heads of tiles of so many rows are attended at once.
  static int heads_at_once(const Attention<T>& attention, int rows) {
    return kMaxRows / rows_apart(static_cast<int>(attention.head_dim), rows);
  }

  // One split of a tile of few rows for some heads, tile of keys by tile of keys, so that memory is read in its order.
  // Meanwhile come the first keys of `next`, what this thread will probably do then. done(head, partial) has results.
  template <typename Done>
  void attend_heads(const Heads& heads, const Heads* next, const Done& done) {
    if constexpr (std::is_same_v<T, BFloat16>)
      if (by_amx()) return attend_heads_with<true>(heads, next, done);
    attend_heads_with<false>(heads, next, done);
  }

  // Splits that were attended one by one, written to `out`.
  void finish_parts(const Tile& tile, int kv_head, float* parts, int count) {
    Partial total(total_, tile.rows, padded_dim_);
    total.clear(tile.rows, padded_dim_);
    size_t size = Partial::size(tile.rows, padded_dim_);
    for (int i = 0; i < count; i++)
      merge(total, Partial(parts + i * size, tile.rows, padded_dim_), tile.rows, padded_dim_);
    write(tile, kv_head, total);
  }

  // A tile's result of all its keys, to `out`.
  void write(const Tile& tile, int kv_head, const Partial& total) {
    for (int r = 0; r < tile.rows; r++) {
      T* to = row_of(attention_.out, attention_.out_strides, tile, kv_head, r);
      float factor = attention_.value_scale / total.sum[r];
      const float* from = total.out + r * padded_dim_;
      int d = 0;
      for (; splits_values_ && d < dim_; d += 2 * kLanes)
        store_joined(to + d, load(from + d) * factor, load(from + d + kLanes) * factor);
      for (; d < dim_; d += kLanes) store_some(to + d, load(from + d) * factor, dim_ - d);
    }
  }

 private:
  template <bool by_amx>
  void finish_with(const Tile& tile, int kv_head, int first_split, int last_split) {
    Partial total(total_, tile.rows, padded_dim_), part(part_, kMaxRows, padded_dim_);
    total.clear(tile.rows, padded_dim_);
    load_query<by_amx>(tile, kv_head, 0);
    for (int split = first_split; split < last_split; split++) {
      part.clear(tile.rows, padded_dim_);
      const Keys keys = attention_.keys_of(tile, split);
      for (int64_t base = keys.first / kTileKeys * kTileKeys; base < keys.last; base += kTileKeys)
        attend<by_amx>(tile, kv_head, 0, keys, base, part);
      merge(total, part, tile.rows, padded_dim_);
    }
    write(tile, kv_head, total);
  }

  template <bool by_amx, typename Done>
  void attend_heads_with(const Heads& heads, const Heads* next, const Done& done) {
    const Tile& tile = heads.tile;
    const Partial all(part_, kMaxRows, padded_dim_);
    const int apart = rows_apart(dim_, tile.rows);
    const auto each_head = [&](const auto& action) {
      for (int head = heads.first, row = 0; head < heads.last; head++, row += apart)
        action(head, row, all.from(row, padded_dim_));
    };
    each_head([&](int head, int row, Partial part) {
      load_query<by_amx>(tile, head, row);
      part.clear(tile.rows, padded_dim_);
    });
    const Keys keys = attention_.keys_of(tile, heads.split);
    for (int64_t base = keys.first / kTileKeys * kTileKeys; base < keys.last; base += kTileKeys) {
      prefetch_.aim_behind(heads, base, next);
      each_head([&](int head, int row, Partial part) { attend<by_amx>(tile, head, row, keys, base, part); });
    }
    each_head([&](int head, int, const Partial& part) { done(head, part); });
  }

  static bool by_amx(int dim) { return std::is_same_v<T, BFloat16> && AmxAttention::serves(dim); }
  static int rows_apart(int dim, int rows) { return by_amx(dim) ? kMaxRowsInParts : rows; }

  template <typename Pointer>
  Pointer row_of(Pointer base, const Strides& strides, const Tile& tile, int kv_head, int row) const {
    int64_t token = attention_.query_start_loc[tile.seq] + (tile.first_row + row) / group_;
    int64_t head = static_cast<int64_t>(kv_head) * group_ + (tile.first_row + row) % group_;
    return base + token * strides.token + head * strides.head;
  }

  template <bool by_amx>
  void load_query(const Tile& tile, int kv_head, int first_row) {
    const T* rows[kMaxRows];
    for (int r = 0; r < tile.rows; r++) {
      positions_[r] = attention_.position(tile, r);
      rows[r] = row_of(attention_.query, attention_.query_strides, tile, kv_head, r);
    }
    if constexpr (by_amx) return amx_.load_query(as_bfloat16(rows), tile.rows, first_row);
    by_vectors_.load_query(rows, tile.rows, first_row);
  }

  // Of bfloat16 rows, which are all that AMX is asked for.
  static const BFloat16* const* as_bfloat16(const T* const* rows) {
    return reinterpret_cast<const BFloat16* const*>(rows);
  }

  // The keys of one tile of them, for rows whose queries lie from `first_row` on.
  template <bool by_amx>
  void attend(const Tile& tile, int kv_head, int first_row, Keys keys, int64_t base, Partial& part) {
    const int from = static_cast<int>(std::max<int64_t>(keys.first - base, 0));
    const int to = static_cast<int>(std::min<int64_t>(keys.last - base, kTileKeys));
    const int vectors = (to + kLanes - 1) / kLanes;
    prefetch_.step_locate();
    locate<by_amx>(tile.seq, kv_head, base, from, to);
    if constexpr (by_amx) {
      prefetch_.step_scores(tile.rows);
      amx_.score(as_bfloat16(key_rows_), first_row, from, to, scores_);
      if (attention_.stored == Stored::kInt8) scale_scores(tile.rows, vectors);
    } else if (attention_.stored == Stored::kInt8) {
      by_vectors_.score(key_bytes_, key_scales_, tile.rows, first_row, from, to, scores_, prefetch_);
    } else {
      by_vectors_.score(key_rows_, tile.rows, first_row, from, to, scores_, prefetch_);
    }
    softmax<by_amx>(tile.rows, base, vectors, part);
    if constexpr (by_amx) {
      prefetch_.step_values(tile.rows);
      amx_.multiply_values(as_bfloat16(value_rows_), from, to, part.out);
    } else if (attention_.stored == Stored::kInt8) {
      multiply_values(value_bytes_, tile.rows, from, to, part.out);
    } else {
      multiply_values(value_rows_, tile.rows, from, to, part.out);
    }
  }

  void scale_scores(int rows, int vectors) {
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < vectors * kLanes; j += kLanes)
        store(scores_ + r * kTileKeys + j, load(scores_ + r * kTileKeys + j) * load(key_scales_ + j));
  }

  // out += probabilities @ values. What few rows read once is not worth a copy.
  template <typename Value>
  void multiply_values(const Value* const* values, int rows, int from, int to, float* out) {
    if (rows > kBlockRows || dim_ != padded_dim_) {
      pack_values(values, from, to);
      return multiply_by(Panel(values_, padded_dim_), rows, from, to, out);
    }
    if constexpr (kSplitsValues && std::is_same_v<Value, T>)
      if (splits_values_) return multiply_by(SplitRows<Value>(values + from), rows, from, to, out);
    multiply_by(ScatteredRows<Value>(values + from), rows, from, to, out);
  }

  template <typename Right>
  void multiply_by(Right right, int rows, int from, int to, float* out) {
    const int vectors = padded_dim_ / kLanes;
    if (rows > kMaxRowsInParts)
      return gemm<true>(rows, vectors, to - from, scores_ + from, kTileKeys, right, out, padded_dim_);
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;  // each goes through all values
    const Hinted<Right, T> hinted(right, prefetch_, (rows + blocks - 1) / blocks);
    gemm<true>(rows, vectors, to - from, scores_ + from, kTileKeys, hinted, out, padded_dim_);
  }

  // Where the rows of keys base + from .. base + to lie. Lanes around them get a row that may be read: their scores
  // are masked.
  template <bool by_amx>
  void locate(int seq, int kv_head, int64_t base, int from, int to) {
    switch (attention_.stored) {
      case Stored::kSame:
        return locate_as<T>(seq, kv_head, base, from, to, key_rows_, value_rows_);
      case Stored::kFp8:
        return locate_as<Float8>(seq, kv_head, base, from, to, key_rows_, value_rows_);
      case Stored::kInt8:
        if constexpr (by_amx)
          locate_as<Int8>(seq, kv_head, base, from, to, key_rows_, value_rows_);
        else
          locate_as<Int8>(seq, kv_head, base, from, to, key_bytes_, value_bytes_);
    }
  }

  template <typename Cached, typename Row>
  void locate_as(int seq, int kv_head, int64_t base, int from, int to, const Row** key_rows, const Row** value_rows) {
    const int32_t* table = attention_.block_tables + seq * attention_.block_tables_stride;
    const Strides key = attention_.key_strides, value = attention_.value_strides;
    const int64_t block_size = attention_.block_size;
    int64_t slot = (base + from) / block_size, offset = (base + from) % block_size;
    for (int j = from; j < to; slot++, offset = 0) {
      const Cached* keys = static_cast<const Cached*>(attention_.key_cache) + table[slot] * key.outer +
                           offset * key.token + kv_head * key.head;
      const Cached* values = static_cast<const Cached*>(attention_.value_cache) + table[slot] * value.outer +
                             offset * value.token + kv_head * value.head;
      for (int end = static_cast<int>(std::min<int64_t>(to, j + block_size - offset)); j < end; j++) {
        if constexpr (std::is_same_v<Cached, Int8>)
          key_scales_[j] = int8_scale(keys, dim_), value_scales_[j] = int8_scale(values, dim_);
        set_row(key_rows[j], keys, j), set_row(value_rows[j], values, kTileKeys + j);
        keys += key.token, values += value.token;
      }
    }
    const int begin = from / kLanes * kLanes, end = (to + kLanes - 1) / kLanes * kLanes;
    std::fill(key_rows + begin, key_rows + from, key_rows[from]);
    std::fill(key_rows + to, key_rows + end, key_rows[from]);
    for (float* scales : {key_scales_, value_scales_})
      std::fill(scales + begin, scales + from, 0.0f), std::fill(scales + to, scales + end, 0.0f);
  }

  // A row as it lies, or as numbers of T in a copy.
  template <typename Row, typename Cached>
  void set_row(const Row*& to, const Cached* row, int copy) {
    if constexpr (std::is_same_v<Row, Cached>) {
      to = row;
    } else {
      T* wide = wide_ + static_cast<size_t>(copy) * padded_dim_;
      widen_row(wide, row, dim_);
      to = wide;
    }
  }

  template <typename Value>
  void pack_values(const Value* const* rows, int from, int to) {
    const int dim = dim_, padded_dim = padded_dim_;
    float* packed = values_;
    for (int j = from; j < to; j++, packed += padded_dim) {
      const Value* row = rows[j];
      int d = 0;
      if constexpr (kSplitsValues && std::is_same_v<Value, T>)
        for (; splits_values_ && d < dim; d += 2 * kLanes) {
          Vec even, odd;
          split(row, load_pairs(row + d, 2 * kLanes), even, odd);
          store(packed + d, even), store(packed + d + kLanes, odd);
        }
      for (; d + kLanes <= dim; d += kLanes) store(packed + d, load(row + d));
      if (d < dim) store(packed + d, load_some(row + d, dim - d));
    }
  }

  // Online softmax: scores become probabilities; running sums and outputs are rescaled to the new maximum.
  template <bool by_amx>
  void softmax(int rows, int64_t base, int vectors, Partial& part) {
    for (int first = 0; first < rows; first += kLanes) {
      const int count = std::min(rows - first, kLanes);
      Vec highest[kLanes] = {}, sums[kLanes] = {};
      for (int r = 0; r < count; r++) {
        prefetch_.step_softmax();
        highest[r] = scale_and_mask(first + r, base, vectors);
      }
      const Vec old_max = load_some(part.max + first, count);
      const Vec new_max = max(old_max, reduce_rows(highest, [](Vec a, Vec b) { return max(a, b); }));
      const Vec shift = new_max == -kInfinity ? Vec{} : new_max, keep = exp2(old_max - shift);
      for (int r = 0; r < count; r++) {
        prefetch_.step_softmax();
        sums[r] = exponentiate<by_amx>(first + r, vectors, shift[r]);
      }
      store_some(part.sum + first, load_some(part.sum + first, count) * keep + sum_rows(sums), count);
      store_some(part.max + first, new_max, count);
      for (int r = 0; r < count; r++)
        if (keep[r] != 1.0f) rescale(part.out + (first + r) * padded_dim_, keep[r]);
    }
  }

  // Q @ Kᵀ becomes scores: scaled, capped, and masked by position. Returns their maxima, lane by lane.
  Vec scale_and_mask(int row, int64_t base, int vectors) {
    float* scores = scores_ + row * kTileKeys;
    int64_t newest = positions_[row];
    int begin = static_cast<int>(std::min<int64_t>(std::max<int64_t>(attention_.oldest(newest) - base, 0), kTileKeys));
    int end = static_cast<int>(std::min<int64_t>(std::max<int64_t>(newest + 1 - base, 0), kTileKeys));
    Vec highest = broadcast(-kInfinity);
    const bool all = begin == 0 && end >= vectors * kLanes;
    for (int v = 0; v < vectors; v++) {
      Vec x = load(scores + v * kLanes);
      x = cap(x * factor_);
      if (!all) x = mask(x, v * kLanes, begin, end);
      store(scores + v * kLanes, x);
      highest = max(highest, x);
    }
    return highest;
  }

  // Scores become probabilities, times the scales of values in int8. Returns the sums of probabilities, lane by lane.
  template <bool by_amx>
  Vec exponentiate(int row, int vectors, float shift) {
    float* scores = scores_ + row * kTileKeys;
    const bool is_int8 = attention_.stored == Stored::kInt8;
    Vec sum = Vec{};
    for (int v = 0; v < vectors; v++) {
      const Vec weight = exp2(load(scores + v * kLanes) - shift);
      store(scores + v * kLanes, is_int8 ? weight * load(value_scales_ + v * kLanes) : weight);
      sum += weight;
    }
    if constexpr (by_amx) {
      for (int v = 0; v < vectors; v += 2)
        amx_.set_weights(row, v, load(scores + v * kLanes), v + 1 < vectors ? load(scores + (v + 1) * kLanes) : Vec{});
    }
    return sum;
  }

  Vec cap(Vec x) const { return attention_.soft_cap > 0 ? tanh(x) * (attention_.soft_cap * kLog2E) : x; }

  // Lanes hold keys lane, lane + 1, ...; those outside [begin, end) get a probability of 0.
  static Vec mask(Vec x, int lane, int begin, int end) {
    IntVec key = lane_ids() + lane;
    return (key >= begin) & (key < end) ? x : broadcast(-kInfinity);
  }

  void rescale(float* out, float factor) {
    for (int d = 0; d < padded_dim_; d += kLanes) store(out + d, load(out + d) * factor);
  }

  const Attention<T>& attention_;
  const int group_, dim_, padded_dim_;
  const float factor_;  // of Q @ Kᵀ: to scores in units of log2, or divided by the soft cap where there is one
  // Whether values are multiplied, and results held, with even and odd dims of two vectors apart: that takes less.
  static constexpr bool kSplitsValues = std::is_same_v<T, BFloat16>;
  const bool splits_values_;
  const size_t panel_, partial_;
  const T *key_rows_[kTileKeys], *value_rows_[kTileKeys];
  const Int8 *key_bytes_[kTileKeys], *value_bytes_[kTileKeys];  // where those of int8 are read as they lie
  float key_scales_[kTileKeys], value_scales_[kTileKeys];       // of int8
  int64_t positions_[kMaxRows];
  float *const values_, *const scores_, *const total_, *const part_;
  Scores<T> by_vectors_;
  KvPrefetch<T> prefetch_;
  AmxAttention amx_;
  T* const wide_;  // [2][kTileKeys][padded_dim]: keys and values that were stored in fewer bits
};

}  // namespace lamina
