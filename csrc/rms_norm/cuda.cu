// The C entry point of rms_norm on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct RmsNormArguments {
  const void *x, *weight;
  void* out;
  int64_t rows, hidden, x_stride;
  double eps;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t rms_norm_arguments_size() { return sizeof(RmsNormArguments); }

int rms_norm(const RmsNormArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    return lamina::rms_norm(static_cast<const T*>(p->x), static_cast<const T*>(p->weight), static_cast<T*>(p->out),
                            p->rows, p->hidden, p->x_stride, static_cast<float>(p->eps), p->stream);
  });
}
}
