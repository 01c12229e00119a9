// (q, scale) of x / sqrt(mean(x²) + eps), rounded to x's type, times weight.
#pragma once

#include "row_norm_quantized.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, the stride in elements. Rows are of 16-byte vectors.
struct QuantizedNormArguments {
  const void *x, *weight;
  uint8_t* out;
  float* scale;
  int64_t rows, hidden, x_stride;
  double eps;
  int64_t group, format, zero_centred, dtype;
  cudaStream_t stream;
};

inline int rms_norm_quantized(const QuantizedNormArguments& a) {
  const QuantizedRows to{a.out, a.scale, a.rows, a.hidden, a.group != 0};
  return with_narrow_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const RowNorm<T> norm{static_cast<const T*>(a.x),
                          nullptr,
                          static_cast<const T*>(a.weight),
                          nullptr,
                          nullptr,
                          a.rows,
                          a.hidden,
                          a.x_stride,
                          0,
                          static_cast<float>(a.eps)};
    return quantized_norm<Sum::kNone>(a.format, a.zero_centred != 0, norm, to, a.stream);
  });
}

}  // namespace lamina
