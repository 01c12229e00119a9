// The C entry point of linear_silu_and_mul on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements. The weights, contiguous, are those
// of the gate and those of what it gates.
struct LinearSiluAndMulArguments {
  const void *x, *weight, *bias;
  void* out;
  int64_t tokens, n, k, x_stride;
  lamina::GemmConfig config;
  int64_t splits_all, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t linear_silu_and_mul_arguments_size() { return sizeof(LinearSiluAndMulArguments); }

int linear_silu_and_mul(const LinearSiluAndMulArguments* a) {
#if LAMINA_HOPPER
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    lamina::Linear<T> p{};
    p.bias = static_cast<const T*>(a->bias), p.out = static_cast<T*>(a->out);
    p.tokens = lamina::narrow(a->tokens), p.n = lamina::narrow(a->n), p.k = lamina::narrow(a->k);
    p.multicast = lamina::narrow(a->config.multicast), p.split_k = lamina::narrow(a->config.split_k);
    p.stages = lamina::narrow(a->config.stages), p.splits_all = a->splits_all != 0;
    p.pace = a->config.pace();
    return lamina::gated_linear(p, a->weight, a->x, a->x_stride, a->config, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
