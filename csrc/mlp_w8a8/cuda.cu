// The C entry point of mlp_w8a8 on CUDA.
#include "kernel.cuh"

// The format of the operands.
#if defined(LAMINA_INT8)
using Format = lamina::Int8;
#else
using Format = lamina::Float8;
#endif

// As the caller packs them: 8 bytes each, strides in elements. x and the weights, those of the gate and then those of
// what it gates, are contiguous, and rows of 16 bytes; n counts both.
struct MlpW8A8Arguments {
  const void *x, *weight, *bias;
  const float *x_scale, *scale;
  void* out;
  int64_t tokens, n, k, token_stride, group_stride, groups;
  lamina::GemmConfig config;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t mlp_w8a8_arguments_size() { return sizeof(MlpW8A8Arguments); }

int mlp_w8a8(const MlpW8A8Arguments* a) {
#if LAMINA_HOPPER
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using Out = decltype(zero);
    lamina::Linear<Format, Out> p{};
    p.x_scale = a->x_scale, p.weight_scale = a->scale;
    p.token_stride = lamina::narrow(a->token_stride), p.group_stride = lamina::narrow(a->group_stride);
    p.groups = lamina::narrow(a->groups);
    p.bias = static_cast<const Out*>(a->bias), p.out = static_cast<Out*>(a->out);
    p.tokens = lamina::narrow(a->tokens), p.n = lamina::narrow(a->n), p.k = lamina::narrow(a->k);
    p.multicast = lamina::narrow(a->config.multicast), p.split_k = lamina::narrow(a->config.split_k);
    p.stages = lamina::narrow(a->config.stages);
    return lamina::gated_scaled_linear(p, a->weight, a->x, a->config, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
