// y + scale * B (A x) by the slot of each token, on raw pointers: shrunk to a few numbers, then expanded.
#pragma once

#include <algorithm>

#include "vector.h"

namespace lamina {

constexpr int64_t kMaxLoraParts = 4;

// Every sum runs along one row in an order of its own, so a token's bits depend on no other and on no threads.
template <typename T>
struct Lora {
  const T* y;
  int64_t y_token;  // stride; a row is contiguous, and so for x
  const T* x;
  int64_t x_token;
  const T* a;           // [slots][parts * rank][columns]
  const T* b;           // [slots][sum of rows][rank]
  const float* scales;  // [slots][parts]
  const int32_t* slots;
  T* out;  // contiguous
  int64_t columns, rank, num_parts, num_rows;
  int64_t rows[kMaxLoraParts];

  float scale(int64_t token, int64_t part) const {
    return slots[token] < 0 ? 0.0f : scales[slots[token] * num_parts + part];
  }

  // The first numbers of row `unit` of A by x; four at a time, as x is widened once for all of them then.
  void shrink(int64_t token, int64_t part, int64_t first, float* shrunk) const {
    const T* own = a + (slots[token] * num_parts + part) * rank * columns + first * columns;
    const T* given = x + token * x_token;
    const int64_t count = std::min<int64_t>(4, rank - first);
    Vec sums[4] = {};
    for (int64_t column = 0; column < columns; column += kLanes) {
      const int64_t left = columns - column;
      const Vec values = load_some(given + column, left);
      for (int64_t i = 0; i < count; i++) sums[i] += values * load_some(own + i * columns + column, left);
    }
    for (int64_t i = 0; i < count; i++)
      shrunk[part * rank + first + i] = reduce(sums[i], [](Vec one, Vec other) { return one + other; });
  }

  // Outputs [first, last) of a part, of which `offset` come before the part.
  void expand(int64_t token, int64_t part, int64_t offset, int64_t first, int64_t last, const float* shrunk) const {
    const T* given = y + token * y_token + offset;
    T* to = out + token * num_rows + offset;
    const float factor = scale(token, part);
    if (factor == 0.0f) {
      std::memcpy(to + first, given + first, (last - first) * sizeof(T));
      return;
    }
    const T* own = b + (slots[token] * num_rows + offset) * rank;
    for (int64_t row = first; row < last; row += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, last - row);
      Vec sums[kLanes] = {};
      for (int64_t place = 0; place < rank; place += kLanes) {
        const Vec values = load_some(shrunk + part * rank + place, rank - place);
        for (int64_t i = 0; i < count; i++) sums[i] += values * load_some(own + (row + i) * rank + place, rank - place);
      }
      const Vec added = sum_rows(sums) * factor;
      store_some(to + row, load_some(given + row, count) + added, count);
    }
  }

  // Work that can be done in any order: some numbers of a token before any of its outputs.
  int64_t num_shrinks() const { return num_parts * ((rank + 3) / 4); }
  int64_t num_expands() const {
    int64_t count = 0;
    for (int64_t part = 0; part < num_parts; part++) count += (rows[part] + kChunk - 1) / kChunk;
    return count;
  }

  void shrink_unit(int64_t token, int64_t unit, float* shrunk) const {
    const int64_t each = (rank + 3) / 4, part = unit / each;
    if (scale(token, part) != 0.0f) shrink(token, part, unit % each * 4, shrunk + token * num_parts * rank);
  }

  void expand_unit(int64_t token, int64_t unit, const float* shrunk) const {
    int64_t part = 0, offset = 0;
    for (; unit >= (rows[part] + kChunk - 1) / kChunk; part++) {
      unit -= (rows[part] + kChunk - 1) / kChunk;
      offset += rows[part];
    }
    const int64_t last = std::min<int64_t>(rows[part], (unit + 1) * kChunk);
    expand(token, part, offset, unit * kChunk, last, shrunk + token * num_parts * rank);
  }

  static constexpr int64_t kChunk = 256;  // outputs
};

}  // namespace lamina
