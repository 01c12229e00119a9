// Keys and values hinted to a core's own cache between the work on those before them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace lamina {

// Rows of some heads of a sequence's keys and values, in the order of memory: lines that follow each other come
// fastest. A core drops hints when it is asked for some dozens of lines at once, so that they come in many small steps,
// as even in time as can be: each in proportion to about how long the work takes that follows it.
template <typename T>
class KvPrefetch {
 public:
  static constexpr int kScoreDims = 32, kFewKeys = 8, kValueKeys = 4;  // between two steps

  // most_few: of how many rows the keys are not packed
  KvPrefetch(const Attention<T>& attention, int most_few) : attention_(attention), most_few_(most_few) {}

  // While a tile of keys from `base` on is attended to comes the one behind it, or the first of `next` if there is one.
  void aim_behind(const Heads& heads, int64_t base, const Heads* next) {
    const int64_t whole = pace(heads.tile.rows) * (heads.last - heads.first), behind = base + kTileKeys;
    if (behind < attention_.keys_of(heads.tile, heads.split).last) return aim(heads, behind, whole);
    if (next != nullptr) aim(*next, attention_.keys_of(next->tile, next->split).first, whole);
  }

  // Before the work on a head of a tile of keys: where they lie; sixteen keys that are packed, a vector of each; scores
  // of kFewKeys keys where they lie, or of kScoreDims dims, a quarter of them or all; either part of the softmax of a
  // row; values of kValueKeys keys by four vectors, or all.
  void step_locate() { step(kLocate); }
  void step_pack() { step(kPack); }
  void step_few() { step(few_pace()); }
  void step_score(int rows) { step(kScore * rows); }
  void step_quarter_of_scores(int rows) { step(scores_pace(rows) / 4); }
  void step_scores(int rows) { step(scores_pace(rows)); }
  void step_softmax() { step(kSoftmax); }
  void step_value(int rows) { step(kValues * rows); }
  void step_values(int rows) { step(values_pace(rows)); }

 private:
  static constexpr int64_t kLocate = 25, kPack = 7, kScore = 12, kSoftmax = 15, kValues = 4, kFew = 16;
  static constexpr int64_t kLine = 64, kOne = 1 << 20;

  static int64_t parts(int64_t count, int64_t at_once) { return (count + at_once - 1) / at_once; }
  int64_t pace(int rows) const {
    const int64_t packed = kTileKeys / kLanes * parts(attention_.head_dim, kLanes * 4 / attention_.cached_size());
    const int64_t scores = rows <= most_few_ ? kTileKeys / kFewKeys * few_pace() : kPack * packed + scores_pace(rows);
    return kLocate + scores + 2 * kSoftmax * rows + values_pace(rows);
  }
  int64_t few_pace() const { return kFew * parts(attention_.head_dim, 64); }
  int64_t scores_pace(int rows) const { return kScore * rows * parts(attention_.head_dim, kScoreDims); }
  int64_t values_pace(int rows) const {
    return kValues * rows * (kTileKeys / kValueKeys) * parts(attention_.head_dim, 4 * kLanes);
  }

  // Keys from `first` to the end of its tile, by steps that come to `whole`.
  void aim(const Heads& heads, int64_t first, int64_t whole) {
    const int64_t last = attention_.keys_of(heads.tile, heads.split).last, size = attention_.cached_size();
    keys_ = {first, std::min(last, (first / kTileKeys + 1) * kTileKeys)};
    table_ = attention_.block_tables + heads.tile.seq * attention_.block_tables_stride;
    first_head_ = heads.first;
    row_bytes_ = (heads.last - heads.first - 1) * attention_.key_strides.head * size + attention_.head_bytes();
    of_values_ = false;
    num_lines_ = num_rows_ = 0;
    lines_a_part_ = 2 * (keys_.last - keys_.first) * parts(row_bytes_, kLine) * kOne / whole + 1;
  }

  void step(int64_t part) {
    due_ += part * lines_a_part_;
    const int64_t wanted = due_ / kOne, lines = std::min(wanted, num_lines_);
    due_ %= kOne;
    hint(lines);
    if (lines < wanted) hint_across_rows(wanted - lines);
  }

  // In assembly, where compilers leave it alone.
  static void hint(const char* line) {
#if defined(__x86_64__) || defined(__i386__)
    asm volatile("prefetcht0 %0" ::"m"(*line));
#elif defined(__aarch64__)
    asm volatile("prfm pldl1keep, [%0]" ::"r"(line));
#endif
  }

  void hint(int64_t lines) {
    for (int64_t i = 0; i < lines; i++) hint(line_ + i * kLine);
    line_ += lines * kLine, num_lines_ -= lines;
  }

  __attribute__((noinline)) void hint_across_rows(int64_t left) {
    while (left > 0 && (num_lines_ > 0 || next_row())) {
      const int64_t lines = std::min(left, num_lines_);
      hint(lines);
      left -= lines;
    }
  }

  // Of a token, or of all that follow each other without a gap.
  bool next_row() {
    if (num_rows_ == 0 && !next_block()) return false;
    num_rows_--;
    line_ = row_ - reinterpret_cast<uintptr_t>(row_) % kLine;
    num_lines_ = (row_ + run_bytes_ - line_ + kLine - 1) / kLine;
    row_ += stride_;
    return true;
  }

  // The keys of a block, then its values.
  bool next_block() {
    if (keys_.first >= keys_.last) return false;
    const void* cache = of_values_ ? attention_.value_cache : attention_.key_cache;
    const Strides& strides = of_values_ ? attention_.value_strides : attention_.key_strides;
    const int64_t size = attention_.cached_size(), block = keys_.first / attention_.block_size;
    const int64_t offset = keys_.first - block * attention_.block_size;
    const int64_t count = std::min(attention_.block_size - offset, keys_.last - keys_.first);
    row_ = static_cast<const char*>(cache) +
           (table_[block] * strides.outer + offset * strides.token + first_head_ * strides.head) * size;
    stride_ = strides.token * size;
    const bool is_one_run = stride_ == row_bytes_;
    num_rows_ = is_one_run ? 1 : count;
    run_bytes_ = is_one_run ? count * row_bytes_ : row_bytes_;
    if (of_values_) keys_.first += count;
    of_values_ = !of_values_;
    return true;
  }

  const Attention<T>& attention_;
  const int most_few_;
  const int32_t* table_ = nullptr;
  int64_t first_head_ = 0;
  Keys keys_{0, 0};         // that are left
  bool of_values_ = false;  // next, of the block at the first of them
  int64_t row_bytes_ = 0, run_bytes_ = 0, stride_ = 0, num_rows_ = 0;
  const char *row_ = nullptr, *line_ = nullptr;
  int64_t num_lines_ = 0, lines_a_part_ = 0, due_ = 0;  // these two times kOne
};

// Rows of values between which hints are given.
template <typename Rows, typename T>
struct Hinted : Rows {
  KvPrefetch<T>& prefetch;
  const int num_rows;  // of the left operand that go through them at once
  Hinted(const Rows& rows, KvPrefetch<T>& hints, int num_rows) : Rows(rows), prefetch(hints), num_rows(num_rows) {}

  template <int columns>
  void load_row(int k, int column, Vec* vectors) const {
    if (k % KvPrefetch<T>::kValueKeys == 0) prefetch.step_value(num_rows);
    Rows::template load_row<columns>(k, column, vectors);
  }
};

}  // namespace lamina
