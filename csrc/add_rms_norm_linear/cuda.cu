// The C entry point of add_rms_norm_linear on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements. Weights are contiguous. Without a residual, x is the
// norm already, and total is not written.
struct AddRmsNormLinearArguments {
  const void *x, *residual, *norm_weight, *weight, *bias;
  void *out, *total;
  int64_t tokens, n, k, x_stride, residual_stride;
  double eps;
  int64_t gated;
  lamina::Cut cut;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t add_rms_norm_linear_arguments_size() { return sizeof(AddRmsNormLinearArguments); }

int add_rms_norm_linear(const AddRmsNormLinearArguments* a) {
#if LAMINA_HOPPER
  return lamina::with_dtype16(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::Linear<T> p{{static_cast<const T*>(a->x), static_cast<const T*>(a->residual),
                               static_cast<const T*>(a->norm_weight), nullptr, static_cast<T*>(a->total), a->tokens,
                               a->k, a->x_stride, a->residual_stride, static_cast<float>(a->eps)},
                              static_cast<const T*>(a->bias),
                              static_cast<T*>(a->out),
                              lamina::narrow(a->tokens),
                              lamina::narrow(a->n),
                              lamina::narrow(a->k),
                              lamina::narrow(a->cut.share),
                              lamina::narrow(a->cut.split),
                              lamina::narrow(a->cut.stages)};
    if (a->residual == nullptr) {
      return lamina::multiply_and_gate(p, a->weight, a->x, a->x_stride, a->cut, a->stream);
    }
    return a->gated ? lamina::norm_and_multiply<T, true>(p, a->weight, a->cut, a->stream)
                    : lamina::norm_and_multiply<T, false>(p, a->weight, a->cut, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
