// The C entry point of add_rms_norm on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct AddRmsNormArguments {
  const void *x, *residual, *weight;
  void *out, *total;
  int64_t rows, hidden, x_stride, residual_stride;
  double eps;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t add_rms_norm_arguments_size() { return sizeof(AddRmsNormArguments); }

int add_rms_norm(const AddRmsNormArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::RowNorm<T> norm{static_cast<const T*>(p->x),
                                  static_cast<const T*>(p->residual),
                                  static_cast<const T*>(p->weight),
                                  static_cast<T*>(p->out),
                                  static_cast<T*>(p->total),
                                  p->rows,
                                  p->hidden,
                                  p->x_stride,
                                  p->residual_stride,
                                  static_cast<float>(p->eps)};
    return lamina::add_rms_norm(norm, p->stream);
  });
}
}
