// out = x @ weight.T + bias, on raw pointers.
#pragma once

#include "gemm.h"

namespace lamina {

template <typename T>
struct Linear {
  const T* x;
  int64_t x_token, x_column;  // strides
  int64_t tokens;
  Matrix<T> weight;
  const T* bias;  // or null
  T* out;         // contiguous

  // A row of x as it lies, or a copy where its elements are apart.
  const T* row(int64_t token, T* copy) const {
    const T* from = x + token * x_token;
    if (x_column == 1) return from;
    for (int64_t k = 0; k < weight.depth; k++) copy[k] = from[k * x_column];
    return copy;
  }

  void write(int64_t token, int64_t row, Vec first, Vec second) const {
    store_rows(token, row, first);
    if (row + kLanes < weight.rows) store_rows(token, row + kLanes, second);
  }

  void write(int64_t token, int64_t row, Vec sums) const { store_rows(token, row, sums); }

  void store_rows(int64_t token, int64_t row, Vec sums) const {
    const int64_t count = weight.rows - row;
    if (bias != nullptr) sums += load_some(bias + row, count);
    store_some(out + token * weight.rows + row, sums, count);
  }

  bool run(Method method, int threads) const {
    return gemm_by<T>(method, weight, false, tokens, threads,
                      Rows{x_column != 1, [this](int64_t token, T* copy) { return row(token, copy); }},
                      [this](int64_t token, int64_t row, auto... sums) { write(token, row, sums...); });
  }
};

}  // namespace lamina
