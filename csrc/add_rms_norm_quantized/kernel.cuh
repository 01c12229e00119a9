// total = x + residual, rounded; (q, scale) of its norm, which reads the sum as it is rounded or before that.
#pragma once

#include "row_norm_quantized.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, strides in elements. Rows are of 16-byte vectors.
struct QuantizedSumAndNormArguments {
  const void *x, *residual, *weight;
  uint8_t* out;
  float* scale;
  void* total;
  int64_t rows, hidden, x_stride, residual_stride;
  double eps;
  int64_t group, format, zero_centred, unrounded, dtype;
  cudaStream_t stream;
};

inline int add_rms_norm_quantized(const QuantizedSumAndNormArguments& a) {
  const QuantizedRows to{a.out, a.scale, a.rows, a.hidden, a.group != 0};
  return with_narrow_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const RowNorm<T> norm{static_cast<const T*>(a.x),
                          static_cast<const T*>(a.residual),
                          static_cast<const T*>(a.weight),
                          nullptr,
                          static_cast<T*>(a.total),
                          a.rows,
                          a.hidden,
                          a.x_stride,
                          a.residual_stride,
                          static_cast<float>(a.eps)};
    return a.unrounded ? quantized_norm<Sum::kUnrounded>(a.format, a.zero_centred != 0, norm, to, a.stream)
                       : quantized_norm<Sum::kRounded>(a.format, a.zero_centred != 0, norm, to, a.stream);
  });
}

}  // namespace lamina
