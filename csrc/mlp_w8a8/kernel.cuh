// Gate and up of lamina::mlp_w8a8: out = silu(x * gateᵀ) * (x * upᵀ), of operands in one byte, with scales.
#pragma once

#include "split_k_launch.cuh"

namespace lamina {

// For few rows, whose weights are all that takes time; cudaErrorInvalidValue for a config that is not compiled.
template <typename In, typename Out>
int gated_scaled_linear(const Linear<In, Out>& p, const void* weight, const void* x, const GemmConfig& config,
                        cudaStream_t stream) {
  return with_gemm_config<true, 64, 8, 16, 32, 64>(config, [&](auto warpgroups, auto tokens) {
    return launch_split_k_gemm<warpgroups.value, tokens.value, true>(p, weight, x, p.k, stream);
  });
}

}  // namespace lamina
