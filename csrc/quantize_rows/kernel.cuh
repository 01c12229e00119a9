// Rows as they are, quantized.
#pragma once

#include "quantize.cuh"

namespace lamina {

template <typename T>
struct PlainRows {
  const T* x;
  int64_t stride;

  __device__ __forceinline__ Vec<T, 8> load(int64_t row, int vec) const {
    return load_from_l2<8>(x + row * stride + vec * 8);
  }
};

}  // namespace lamina
