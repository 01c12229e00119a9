// out = x / sqrt(mean(x²) + eps), rounded to x's type, times weight.
#pragma once

#include "row_norm.cuh"

namespace lamina {

template <typename T>
int rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t hidden, int64_t x_stride, float eps,
             cudaStream_t stream) {
  return launch_norm<T, false>({x, nullptr, weight, out, nullptr, rows, hidden, x_stride, 0, eps}, stream);
}

}  // namespace lamina
