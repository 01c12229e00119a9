// C interface of the CUDA kernel of add_rms_norm.
#include "kernel.cuh"

extern "C" int lamina_add_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* total,
                                   int64_t rows, int64_t hidden, int64_t x_stride, int64_t residual_stride, double eps,
                                   int dtype, void* stream) {
  return lamina::with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::RowNorm<T> norm{static_cast<const T*>(x),
                                  static_cast<const T*>(residual),
                                  static_cast<const T*>(weight),
                                  static_cast<T*>(out),
                                  static_cast<T*>(total),
                                  rows,
                                  hidden,
                                  x_stride,
                                  residual_stride,
                                  static_cast<float>(eps)};
    return lamina::add_rms_norm(norm, static_cast<cudaStream_t>(stream));
  });
}
