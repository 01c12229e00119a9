// out = (silu_and_mul of) norm(x + residual) @ weight.T + bias; each step rounds as an op of its own would.
#pragma once

#include <cmath>

#include "gemm.h"
#include "rounding.h"

namespace lamina {

template <typename T>
struct Norm {
  const T *x, *residual, *weight;
  int64_t x_token, residual_token;  // strides; a row is contiguous
  int64_t width;
  float eps;
  T* total;  // contiguous

  // The sum of a token, kept, and its norm in `to`.
  const T* row(int64_t token, T* to) const {
    const T *left = x + token * x_token, *right = residual + token * residual_token;
    T* sum = total + token * width;
    Vec squares = {};
    for (int64_t k = 0; k < width; k += kLanes) {
      Vec both = rounded<T>(load_some(left + k, width - k) + load_some(right + k, width - k));
      store_some(sum + k, both, width - k);
      squares += both * both;
    }
    const float mean = reduce(squares, [](Vec a, Vec b) { return a + b; }) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + eps);
    for (int64_t k = 0; k < width; k += kLanes) {
      Vec unit = rounded<T>(load_some(sum + k, width - k) * scale);
      store_some(to + k, unit * load_some(weight + k, width - k), width - k);
    }
    return to;
  }
};

template <typename T>
inline Vec silu_and_mul(Vec gate, Vec up) {
  Vec g = rounded<T>(gate);
  return rounded<T>(g / (1.0f + exp(-g))) * rounded<T>(up);
}

template <typename T, typename W>
struct AddRmsNormLinear {
  Norm<T> norm;
  int64_t tokens;
  Matrix<W> weight;
  const float* scale;  // of each row, or null
  const T* bias;       // or null
  bool gated;
  T* out;  // contiguous

  int64_t out_rows() const { return gated ? weight.rows / 2 : weight.rows; }

  void write(int64_t token, int64_t row, Vec first, Vec second) const {
    const int64_t width = out_rows(), count = width - row;
    T* to = out + token * width + row;
    if (gated) return store_some(to, silu_and_mul<T>(finished(first, row), finished(second, width + row)), count);
    store_some(to, finished(first, row), count);
    if (count > kLanes) store_some(to + kLanes, finished(second, row + kLanes), count - kLanes);
  }

  void write(int64_t token, int64_t row, Vec sums) const {  // of what is not gated
    store_some(out + token * out_rows() + row, finished(sums, row), out_rows() - row);
  }

  Vec finished(Vec sums, int64_t row) const {
    const int64_t count = out_rows() - row % out_rows();
    if (scale != nullptr) sums *= load_some(scale + row, count);
    return bias == nullptr ? sums : sums + load_some(bias + row, count);
  }

  bool run(Method method, int threads) const {
    return gemm_by<T>(method, weight, gated, tokens, threads,
                      Rows{true, [this](int64_t token, T* to) { return norm.row(token, to); }},
                      [this](int64_t token, int64_t row, auto... sums) { write(token, row, sums...); });
  }
};

}  // namespace lamina
