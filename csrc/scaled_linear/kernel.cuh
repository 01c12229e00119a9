// out = (x * weightᵀ) * scales + bias, of operands in one byte.
#pragma once

#include "persistent_launch.cuh"

namespace lamina {

// Those of FP8 are kept twice, so that no block takes as many rows of x as it could in 16 bits.
template <typename In, typename Out>
int scaled_linear(const Linear<In, Out>& p, const void* weight, const void* x, const GemmConfig& config,
                  cudaStream_t stream) {
  if (config.is_persistent()) return persistent_gemm<false>(p, weight, x, p.k, config, stream);
  return with_gemm_config<false, 64, 8, 16, 32, 64, 128>(config, [&](auto warpgroups, auto tokens) {
    return launch_split_k_gemm<warpgroups.value, tokens.value, false>(p, weight, x, p.k, stream);
  });
}

}  // namespace lamina
