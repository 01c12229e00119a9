// GEMM micro-kernel: a small float32 GEMM of packed panels, blocked in registers.
#pragma once

#include "vector.h"

namespace lamina {

// The right operand: row k as a pointer to elements that `load` turns into the lanes of a vector, how the left operand
// becomes a vector, and how both are multiplied and added to a sum.
struct Floats {
  static Vec left(const float* from) { return broadcast(*from); }
  static Vec add(Vec sum, Vec left, Vec right) { return sum + left * right; }
};

struct Panel : Floats {
  const float* data;
  int stride;
  Panel(const float* from, int row_stride) : data(from), stride(row_stride) {}
  const float* row(int k) const { return data + k * stride; }
};

template <typename T>
struct ScatteredRows : Floats {
  const T* const* rows;
  explicit ScatteredRows(const T* const* from) : rows(from) {}
  const T* row(int k) const { return rows[k]; }
};

// c[rows][columns] (+)= a[rows][depth] @ b[depth][columns], for `columns` vectors from element `column` on. Every
// element of c is one chain of multiply-adds over depth, so its bits do not depend on how the GEMM is blocked.
template <bool accumulate, int rows, int columns, typename Right>
inline void gemm_block(int column, int depth, const float* a, int lda, const Right& b, float* c, int ldc) {
  Vec sum[rows][columns];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < columns; v++) sum[r][v] = accumulate ? load(c + r * ldc + column + v * kLanes) : Vec{};
  for (int k = 0; k < depth; k++) {
    Vec right[columns];
    for (int v = 0; v < columns; v++) right[v] = load(b.row(k) + column + v * kLanes);
    for (int r = 0; r < rows; r++) {
      Vec left = Right::left(a + r * lda + k);
      for (int v = 0; v < columns; v++) sum[r][v] = Right::add(sum[r][v], left, right[v]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < columns; v++) store(c + r * ldc + column + v * kLanes, sum[r][v]);
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
  if constexpr (columns > 1) gemm<accumulate, columns - 1>(rows, vectors, depth, a, lda, b, c, ldc, column);
}

}  // namespace lamina
