// A small matrix product on packed float panels, blocked in registers.
#pragma once

#include "vector.h"

namespace lamina {

// c[rows][cols] (+)= a[rows][depth] @ b[depth][cols]; cols are vectors. Every element of c is one chain of
// multiply-adds over depth, so its bits do not depend on how the product is blocked.
template <bool accumulate, int rows, int cols>
inline void gemm_block(int depth, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
  Vec sum[rows][cols];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < cols; v++) sum[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : Vec{};
  for (int k = 0; k < depth; k++) {
    Vec right[cols];
    for (int v = 0; v < cols; v++) right[v] = load(b + k * ldb + v * kLanes);
    for (int r = 0; r < rows; r++) {
      Vec left = broadcast(a[r * lda + k]);
      for (int v = 0; v < cols; v++) sum[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < cols; v++) store(c + r * ldc + v * kLanes, sum[r][v]);
}

constexpr int kBlockRows = 6;
constexpr int kBlockCols = kRegisters == 32 ? 4 : 2;

template <bool accumulate, int cols, int rows = kBlockRows>
inline void gemm_rows(int count, int depth, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
  for (; count >= rows; count -= rows, a += rows * lda, c += rows * ldc)
    gemm_block<accumulate, rows, cols>(depth, a, lda, b, ldb, c, ldc);
  if constexpr (rows > 1) gemm_rows<accumulate, cols, rows - 1>(count, depth, a, lda, b, ldb, c, ldc);
}

template <bool accumulate, int cols = kBlockCols>
inline void gemm(int rows, int vectors, int depth, const float* a, int lda, const float* b, int ldb, float* c,
                 int ldc) {
  for (; vectors >= cols; vectors -= cols, b += cols * kLanes, c += cols * kLanes)
    gemm_rows<accumulate, cols>(rows, depth, a, lda, b, ldb, c, ldc);
  if constexpr (cols > 1) gemm<accumulate, cols - 1>(rows, vectors, depth, a, lda, b, ldb, c, ldc);
}

}  // namespace lamina
