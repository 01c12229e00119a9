// GEMM micro-kernel: a small float32 GEMM of packed panels, blocked in registers.
#pragma once

#include <utility>

#include "vector.h"

namespace lamina {

// The right operand: vectors of its row k, how the left operand becomes a vector, and how both are multiplied and added
// to a sum.
struct Floats {
  static constexpr int kColumns = 1;         // that come together
  static constexpr bool kAddsAtEnd = false;  // to what there was: sums start at it, or at 0
  static Vec left(const float* from) { return broadcast(*from); }
  static Vec add(Vec sum, Vec left, Vec right) { return sum + left * right; }
};

struct Panel : Floats {
  const float* data;
  int stride;
  Panel(const float* first, int row_stride) : data(first), stride(row_stride) {}
  template <int columns>
  void load_row(int k, int column, Vec* vectors) const {
    for (int v = 0; v < columns; v++) vectors[v] = load(data + k * stride + column + v * kLanes);
  }
};

template <typename T>
struct ScatteredRows : Floats {
  const T* const* rows;
  explicit ScatteredRows(const T* const* first) : rows(first) {}
  template <int columns>
  void load_row(int k, int column, Vec* vectors) const {
    for (int v = 0; v < columns; v++) vectors[v] = load(rows[k] + column + v * kLanes);
  }
};

// Rows whose elements come apart: the even ones of two vectors in the first of them, the odd ones in the second.
template <typename T>
struct SplitRows : Floats {
  static constexpr int kColumns = 2;
  const T* const* rows;
  explicit SplitRows(const T* const* first) : rows(first) {}
  template <int columns>
  void load_row(int k, int column, Vec* vectors) const {
    static_assert(columns % 2 == 0, "pairs of vectors");
    for (int v = 0; v < columns; v += 2)
      split(rows[k], load_pairs(rows[k] + column + v * kLanes, 2 * kLanes), vectors[v], vectors[v + 1]);
  }
};

// body(i) for each i. A compiler that sees a loop in its place keeps the sums of a block in memory.
template <int... i, typename Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, i...>, const Body& body) {
  (body(i), ...);
}

// c[rows][columns] (+)= a[rows][depth] @ b[depth][columns], for `columns` vectors from element `column` on. Every
// element of c is one chain of multiply-adds over depth, so its bits do not depend on how the GEMM is blocked.
template <bool accumulate, int rows, int columns, typename Right>
inline void gemm_block(int column, int depth, const float* a, int lda, const Right& b, float* c, int ldc) {
  constexpr bool starts_at_c = accumulate && !Right::kAddsAtEnd, ends_with_c = accumulate && Right::kAddsAtEnd;
  Vec sum[rows][columns];
  const auto each_sum = std::make_integer_sequence<int, rows * columns>();
  unrolled(each_sum, [&](int i) {
    sum[i / columns][i % columns] = starts_at_c ? load(c + (i / columns) * ldc + column + i % columns * kLanes) : Vec{};
  });
  for (int k = 0; k < depth; k++) {
    Vec right[columns];
    b.template load_row<columns>(k, column, right);
    for (int r = 0; r < rows; r++) {
      Vec left = Right::left(a + r * lda + k);
      for (int v = 0; v < columns; v++) sum[r][v] = Right::add(sum[r][v], left, right[v]);
    }
  }
  unrolled(each_sum, [&](int i) {
    float* to = c + (i / columns) * ldc + column + i % columns * kLanes;
    store(to, ends_with_c ? load(to) + sum[i / columns][i % columns] : sum[i / columns][i % columns]);
  });
}

constexpr int kBlockRows = 6;
constexpr int kBlockColumns = kRegisters == 32 ? 4 : 2;

template <bool accumulate, int columns, int rows = kBlockRows, typename Right>
inline void gemm_rows(int count, int column, int depth, const float* a, int lda, const Right& b, float* c, int ldc) {
  for (; count >= rows; count -= rows, a += rows * lda, c += rows * ldc)
    gemm_block<accumulate, rows, columns>(column, depth, a, lda, b, c, ldc);
  if constexpr (rows > 1) gemm_rows<accumulate, columns, rows - 1>(count, column, depth, a, lda, b, c, ldc);
}

template <bool accumulate, int columns = kBlockColumns, typename Right>
inline void gemm(int rows, int vectors, int depth, const float* a, int lda, const Right& b, float* c, int ldc,
                 int column = 0) {
  for (; vectors >= columns; vectors -= columns, column += columns * kLanes)
    gemm_rows<accumulate, columns>(rows, column, depth, a, lda, b, c, ldc);
  constexpr int fewer = columns - Right::kColumns;
  if constexpr (fewer > 0) gemm<accumulate, fewer>(rows, vectors, depth, a, lda, b, c, ldc, column);
}

}  // namespace lamina
