// out = (x @ weight.T) * x_scale * scale + bias with e4m3 weights and a scale a row of each, on raw pointers.
#pragma once

#include "fp8.h"
#include "gemm.h"

namespace lamina {

constexpr int64_t kGroup = 128;  // columns that share a scale, where a row has several

// Weights in float, times the scales of their groups where those are given.
struct WidenFp8 {
  Matrix<Float8> weight;
  const float* scale;  // [rows, groups] or null
  float* out;          // contiguous

  void run(int threads) const {
    const int64_t groups = (weight.depth + kGroup - 1) / kGroup;
    parallel_chunks(weight.rows, weight.rows * weight.depth > kMinParallelWork ? threads : 1, [&](int64_t row) {
      const Float8* from = weight.data + row * weight.stride;
      float* to = out + row * weight.depth;
      for (int64_t k = 0; k < weight.depth; k += kLanes) {
        const float factor = scale == nullptr ? 1.0f : scale[row * groups + k / kGroup];
        const int64_t count = weight.depth - k;
        Float8 end[kLanes] = {};
        if (count < kLanes) std::memcpy(end, from + k, count);
        store_some(to + k, load(count < kLanes ? end : from + k) * broadcast(factor), count);
      }
    });
  }
};

template <typename T>
struct ScaledLinear {
  const float* x;  // [tokens, depth], the values of activations in e4m3
  const float* x_scale;
  int64_t tokens;
  Matrix<Float8> weight;
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
    sums *= broadcast(x_scale[token]);
    sums *= load_some(scale + row, count);
    if (bias != nullptr) sums += load_some(bias + row, count);
    store_some(out + token * weight.rows + row, sums, count);
  }

  void run(int threads) const {
    gemm_by<float>(Method::kDot, weight, false, tokens, threads,
                   Rows{false, [this](int64_t token, float*) { return x + token * weight.depth; }},
                   [this](int64_t token, int64_t row, auto... sums) { write(token, row, sums...); });
  }
};

}  // namespace lamina
