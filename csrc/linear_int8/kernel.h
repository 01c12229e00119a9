// out = (x @ weight.T) * scale + bias with int8 weights and a scale a row, on raw pointers.
#pragma once

#include "gemm.h"

namespace lamina {

template <typename T>
struct LinearInt8 {
  const T* x;
  int64_t x_token;  // stride; a row is contiguous
  int64_t tokens;
  Matrix<int8_t> weight;
  const float* scale;  // of each row
  const T* bias;       // or null
  T* out;              // contiguous

  void write(int64_t token, int64_t row, Vec first, Vec second) const {
    store_rows(token, row, first);
    if (row + kLanes < weight.rows) store_rows(token, row + kLanes, second);
  }

  void write(int64_t token, int64_t row, Vec sums) const { store_rows(token, row, sums); }

  void store_rows(int64_t token, int64_t row, Vec sums) const {
    const int64_t count = weight.rows - row;
    sums *= load_some(scale + row, count);
    if (bias != nullptr) sums += load_some(bias + row, count);
    store_some(out + token * weight.rows + row, sums, count);
  }

  bool run(Method method, int threads) const {
    return gemm_by<T>(method, weight, false, tokens, threads,
                      Rows{false, [this](int64_t token, T*) { return x + token * x_token; }},
                      [this](int64_t token, int64_t row, auto... sums) { write(token, row, sums...); });
  }
};

}  // namespace lamina
