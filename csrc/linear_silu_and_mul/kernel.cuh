// GEMM and gate of lamina::linear_silu_and_mul: out = silu(x * gateᵀ + bias) * (x * upᵀ + bias).
#pragma once

#include "persistent_launch.cuh"

namespace lamina {

template <typename T>
int gated_linear(const Linear<T>& p, const void* weight, const void* x, int64_t x_stride, const GemmConfig& config,
                 cudaStream_t stream) {
  if (config.is_persistent()) return persistent_gemm<true>(p, weight, x, x_stride, config, stream);
  return with_gemm_config<true, 128, 8, 16, 32, 64, 128, 256>(config, [&](auto warpgroups, auto tokens) {
    return launch_split_k_gemm<warpgroups.value, tokens.value, true>(p, weight, x, x_stride, stream);
  });
}

}  // namespace lamina
