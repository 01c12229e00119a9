// The arguments of GEMMs of operands in one byte, as callers pack them, and what the kernels make of them.
#pragma once

#include "gemm_config.cuh"
#include "launch.cuh"
#include "scaled_gemm.cuh"

namespace lamina {

// The format of the operands: of each a library of its own.
#if defined(LAMINA_INT8)
using Format = Int8;
#else
using Format = Float8;
#endif

// 8 bytes each, strides in elements. x and the weights are contiguous, and rows of 16 bytes; n counts rows of weights,
// of a gate and then of what it gates where there is one.
struct ScaledLinearArguments {
  const void *x, *weight, *bias;
  const float *x_scale, *scale;
  void* out;
  int64_t tokens, n, k, token_stride, group_stride, groups;
  GemmConfig config;
  int64_t dtype;
  cudaStream_t stream;
};

// Calls multiply with the kernels' arguments, as far as those of a caller say what they are.
template <typename Multiply>
inline int with_scaled_linear(const ScaledLinearArguments& a, const Multiply& multiply) {
  return with_narrow_dtype(a.dtype, [&](auto zero) {
    using Out = decltype(zero);
    Linear<Format, Out> p{};
    p.x_scale = a.x_scale, p.weight_scale = a.scale;
    p.token_stride = narrow(a.token_stride), p.group_stride = narrow(a.group_stride);
    p.groups = narrow(a.groups);
    p.bias = static_cast<const Out*>(a.bias), p.out = static_cast<Out*>(a.out);
    p.tokens = narrow(a.tokens), p.n = narrow(a.n), p.k = narrow(a.k);
    p.multicast = narrow(a.config.multicast), p.split_k = narrow(a.config.split_k);
    p.stages = narrow(a.config.stages), p.pace = a.config.pace();
    return multiply(p);
  });
}

}  // namespace lamina
