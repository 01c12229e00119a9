// The C entry point of linear_w8a8 on CUDA, for few rows.
#include "kernel.cuh"

// The format of the operands.
#if defined(LAMINA_INT8)
using Format = lamina::Int8;
#else
using Format = lamina::Float8;
#endif

// As the caller packs them: 8 bytes each, strides in elements. The weights are contiguous; rows are of 16 bytes.
struct LinearW8A8Arguments {
  const void *x, *weight, *bias;
  const float* scale;
  void* out;
  int64_t tokens, n, k, x_stride, groups;
  lamina::GemmConfig config;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t linear_w8a8_arguments_size() { return sizeof(LinearW8A8Arguments); }

int linear_w8a8(const LinearW8A8Arguments* a) {
#if LAMINA_HOPPER
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    lamina::QuantizingLinear<Format, T> p{};
    p.x = static_cast<const T*>(a->x), p.x_stride = a->x_stride;
    p.weight_scale = a->scale, p.groups = lamina::narrow(a->groups);
    p.bias = static_cast<const T*>(a->bias), p.out = static_cast<T*>(a->out);
    p.tokens = lamina::narrow(a->tokens), p.n = lamina::narrow(a->n), p.k = lamina::narrow(a->k);
    p.split_k = lamina::narrow(a->config.split_k), p.stages = lamina::narrow(a->config.stages);
    p.paces = (a->config.clusters & lamina::kPaces) != 0;
    return lamina::quantizing_linear(p, a->weight, a->config, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
