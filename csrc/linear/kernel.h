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

  // Rows of x as they lie, or a copy where their elements are apart.
  void rows(int64_t first, int count, const T** to) const {
    thread_local Buffer buffer;
    T* copy = x_column == 1
                  ? nullptr
                  : reinterpret_cast<T*>(buffer.reserve(count * weight.depth * sizeof(T) / sizeof(float) + 1));
    for (int t = 0; t < count; t++) {
      const T* from = x + (first + t) * x_token;
      to[t] = copy == nullptr ? from : copy + t * weight.depth;
      if (copy != nullptr)
        for (int64_t k = 0; k < weight.depth; k++) copy[t * weight.depth + k] = from[k * x_column];
    }
  }

  void write(int64_t token, int64_t row, Vec first, Vec second) const {
    store_rows(token, row, first);
    if (row + kLanes < weight.rows) store_rows(token, row + kLanes, second);
  }

  void store_rows(int64_t token, int64_t row, Vec sums) const {
    const int64_t count = weight.rows - row;
    if (bias != nullptr) sums += load_some(bias + row, count);
    store_some(out + token * weight.rows + row, sums, count);
  }

  bool run(Method method, int threads) const {
    return gemm_by<T>(
        method, weight, false, tokens, threads,
        [this](int64_t first, int count, const T** to) { rows(first, count, to); },
        [this](int64_t token, int64_t row, Vec first, Vec second) { write(token, row, first, second); });
  }
};

}  // namespace lamina
