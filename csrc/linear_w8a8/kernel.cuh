// out = quantized(x) * weightᵀ * scales + bias for up to 8 rows of x in 16 bits.
#pragma once

#include "gemm.cuh"
#include "split_k_launch.cuh"

namespace lamina {

// As many stages as fit where the configuration would have a block with x beside the weights: in half of a
// multiprocessor's memory, or all of it.
template <typename S>
int stages_of(int stages, int tiles) {
  constexpr int kHalf = 113 << 10, kAll = 227 << 10;
  const int limit = S::Base::bytes(stages) <= kHalf ? kHalf : kAll;
  while (stages > 2 && S::bytes(stages, tiles) > limit) --stages;
  return stages;
}

template <int kWarpgroups, bool kShares, typename In, typename T>
int launch_quantizing_gemm(QuantizingLinear<In, T> p, const void* weight_data, cudaStream_t stream) {
  using S = QuantizingShape<In, kWarpgroups, kShares>;
  CUtensorMap weight;
  const auto kernel = quantizing_gemm_kernel<S, kWarpgroups, In, T>;
  const int tiles = S::tiles(p.k, p.split_k);
  p.stages = stages_of<S>(p.stages, tiles);
  cudaError_t error = make_matrix_map<In>(&weight, weight_data, p.n, p.k, p.k, kRows);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.n, S::kBlockRows) * p.split_k),
                  static_cast<unsigned>(ceil_div(p.tokens, 8)));
  return launch_clusters_pdl(static_cast<unsigned>(p.split_k), kernel, grid, dim3(S::kThreads + kWarp),
                             S::bytes(p.stages, tiles), stream, weight, p);
}

// What a configuration's clusters say here, where no kernel is persistent: a sum of these.
constexpr int64_t kSharesPeaks = 1, kPaces = 2;

// cudaErrorInvalidValue for a config that is not compiled, or too many columns a rank.
template <typename In, typename T>
int quantizing_linear(const QuantizingLinear<In, T>& p, const void* weight, const GemmConfig& config,
                      cudaStream_t stream) {
  const bool can_share = config.split_k > 1 && p.groups == 0, shares = config.clusters & kSharesPeaks;
  if (config.multicast != 1 || config.clusters > kSharesPeaks + kPaces || shares > can_share)
    return cudaErrorInvalidValue;
  return with_gemm_config<false, 0, 8>(config, [&](auto warpgroups, auto) {
    return shares ? launch_quantizing_gemm<warpgroups.value, true>(p, weight, stream)
                  : launch_quantizing_gemm<warpgroups.value, false>(p, weight, stream);
  });
}

}  // namespace lamina
