// The C entry point of linear_w4a16 on CUDA.
#include "kernel.cuh"

// Bits of a weight.
#if defined(LAMINA_EIGHT_BITS)
constexpr int kBits = 8;
#else
constexpr int kBits = 4;
#endif

// As the caller packs them: 8 bytes each, strides in elements. All but x is contiguous. Without x the weights are
// written to out.
struct LinearW4A16Arguments {
  const void *x, *weight, *scale, *zero, *bias;
  void* out;
  int64_t tokens, n, k, x_stride, groups, group_shift, gated;
  lamina::GemmConfig config;
  int64_t dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t linear_w4a16_arguments_size() { return sizeof(LinearW4A16Arguments); }

int linear_w4a16(const LinearW4A16Arguments* a) {
#if LAMINA_HOPPER
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    lamina::LinearW4A16<T> p{};
    p.bias = static_cast<const T*>(a->bias), p.out = static_cast<T*>(a->out);
    p.tokens = lamina::narrow(a->tokens), p.n = lamina::narrow(a->n), p.k = lamina::narrow(a->k);
    p.multicast = lamina::narrow(a->config.multicast), p.split_k = lamina::narrow(a->config.split_k);
    p.stages = lamina::narrow(a->config.stages);
    p.weight = static_cast<const uint8_t*>(a->weight);
    p.scale = static_cast<const T*>(a->scale), p.zero = static_cast<const T*>(a->zero);
    p.groups = lamina::narrow(a->groups), p.group_shift = lamina::narrow(a->group_shift);
    p.paces = (a->config.clusters & lamina::kPaces) != 0;
    if (a->x == nullptr) return lamina::write_out<kBits>(p, p.out, a->stream);
    return a->gated ? lamina::linear_w4a16<kBits, true>(p, a->x, a->x_stride, a->config, a->stream)
                    : lamina::linear_w4a16<kBits, false>(p, a->x, a->x_stride, a->config, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
