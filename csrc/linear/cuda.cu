// The C entry point of linear on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements. The weights are contiguous.
struct LinearArguments {
  const void *x, *weight, *bias;
  void* out;
  int64_t tokens, n, k, x_stride;
  lamina::GemmConfig config;
  int64_t splits_all, promises_x;
  lamina::AdaptersBehind behind;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t linear_arguments_size() { return sizeof(LinearArguments); }

int linear(const LinearArguments* a) {
#if LAMINA_HOPPER
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    lamina::Linear<T> p{};
    p.bias = static_cast<const T*>(a->bias), p.out = static_cast<T*>(a->out);
    p.tokens = lamina::narrow(a->tokens), p.n = lamina::narrow(a->n), p.k = lamina::narrow(a->k);
    p.multicast = lamina::narrow(a->config.multicast), p.split_k = lamina::narrow(a->config.split_k);
    p.stages = lamina::narrow(a->config.stages), p.splits_all = a->splits_all != 0;
    p.pace = a->config.pace();
    p.promises_x = a->promises_x != 0, p.behind = a->behind;
    return lamina::linear(p, a->weight, a->x, a->x_stride, a->config, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
