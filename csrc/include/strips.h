// Strips of weights, and how they come to a core before they are multiplied.
#pragma once

#include <cstdint>

#include "vector.h"

namespace lamina {

// kLanes rows of weights, or fewer at the end of a matrix.
template <typename W>
struct Strip {
  const W* data;
  int64_t stride;  // in elements
  int count;
};

// One or two strips that a thread claims together, with the rows of the result they stand for.
template <typename W>
struct Unit {
  Strip<W> strips[2];
  int64_t rows_ahead;  // from a strip to the one the same thread takes next
  int count = 2;       // of the strips; 0 where there is no unit
};

// The part of some strips that is multiplied while the part behind it comes.
template <typename W>
struct Piece {
  const Strip<W>* strips;
  int count;
  int64_t from, to;  // columns
};

// Asks for lines of strips ahead of their use, in the order in which they lie: that is the order in which memory is
// read fastest, and one page after another.
class Fetch {
 public:
  // Begins with columns from .. to of `count` strips, and forgets what was not asked for.
  template <typename W>
  void aim(const Strip<W>* strips, int count, int64_t from, int64_t to) {
    num_ranges_ = range_ = rows_left_ = 0;
    at_ = end_ = 0;
    for (; num_ranges_ < count; num_ranges_++) {
      const Strip<W>& strip = strips[num_ranges_];
      const int64_t row = (to - from) * static_cast<int64_t>(sizeof(W)), stride = strip.stride * sizeof(W);
      const bool is_whole = row == stride;
      ranges_[num_ranges_] = {reinterpret_cast<uintptr_t>(strip.data + from), is_whole ? row * strip.count : row,
                              stride, is_whole ? 1 : strip.count};
    }
  }

  void lines(int64_t count) {
    for (; count > 0 && (at_ < end_ || next_row()); count--, at_ += kLine)
      __builtin_prefetch(reinterpret_cast<const void*>(at_), 0, 2);
  }

  void rest() { lines(INT64_MAX); }

 private:
  static constexpr uintptr_t kLine = 64;
  struct Range {
    uintptr_t data;
    int64_t row, stride;  // bytes
    int rows;
  };

  bool next_row() {
    if (rows_left_ == 0) {
      if (range_ == num_ranges_) return false;
      row_ = ranges_[range_].data;
      rows_left_ = ranges_[range_++].rows;
    }
    const Range& range = ranges_[range_ - 1];
    at_ = row_ / kLine * kLine;
    end_ = row_ + range.row;
    row_ += range.stride;
    rows_left_--;
    return true;
  }

  Range ranges_[2];
  int num_ranges_ = 0, range_ = 0, rows_left_ = 0;
  uintptr_t at_ = 0, end_ = 0, row_ = 0;
};

}  // namespace lamina
