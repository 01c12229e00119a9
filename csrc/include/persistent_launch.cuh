// Launch of the persistent GEMM.
#pragma once

#include "persistent_gemm.cuh"
#include "split_k_launch.cuh"

namespace lamina {

// The tensor map of the weights: boxes of 128 bytes by 64 rows; where kGated, 8 rows of each half of the weights in
// turn.
template <typename T, bool kGated>
inline cudaError_t make_weight_map(CUtensorMap* map, const void* data, int64_t rows, int64_t columns) {
  if (kGated)
    return encode_tensor_map<T, 4>(
        map, data,
        {{columns, 8, 2, rows / 16}, {columns, rows / 2 * columns, 8 * columns}, {kTileColumns<T>, 8, 2, kRows / 16}});
  return encode_tensor_map<T, 4>(
      map, data, {{columns, rows, 1, 1}, {columns, rows * columns, rows * columns}, {kTileColumns<T>, kRows, 1, 1}});
}

template <typename S, bool kGated, typename In, typename Out>
int launch_persistent_gemm(const Linear<In, Out>& p, const void* weight_data, const void* x_data, int64_t x_stride,
                           int64_t clusters, cudaStream_t stream) {
  CUtensorMap weight, x;
  const auto kernel = persistent_gemm_kernel<S, kGated, In, Out>;
  cudaError_t error = make_weight_map<In, kGated>(&weight, weight_data, p.n, p.k);
  if (error == cudaSuccess) error = make_matrix_map<In>(&x, x_data, p.tokens, p.k, x_stride, p.box_rows);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int64_t strips = ceil_div(p.n, kRows) * ceil_div(p.tokens, S::kTokenRows);
  const auto useful = static_cast<unsigned>(smaller(clusters, strips));
  return launch_clusters_pdl(S::kCluster, kernel, dim3(useful * S::kCluster), dim3(S::kAllThreads), S::kBytes, stream,
                             weight, x, p);
}

// The epilogue stores 8 results at once. Up to 192 rows of x need less than a tile for 256, or two for 128.
// cudaErrorInvalidValue for a config that is not compiled.
template <bool kGated, typename In, typename Out>
int persistent_gemm(const Linear<In, Out>& p, const void* weight, const void* x, int64_t x_stride,
                    const GemmConfig& config, cudaStream_t stream) {
  if (p.n % (kGated ? 16 : 8) != 0) return cudaErrorInvalidValue;
  return with_constant<1, 2>(config.warpgroups, [&](auto warpgroups) {
    return with_constant<128, 192, 256>(p.tokens > 128 && p.tokens <= 192 ? 192 : config.tile_tokens, [&](auto tokens) {
      const auto launch = [&](auto shape) -> int {
        using S = decltype(shape);
        Linear<In, Out> whole = p;
        whole.box_rows = rows_to_copy<S>(p.tokens);
        return launch_persistent_gemm<S, kGated>(whole, weight, x, x_stride, config.clusters, stream);
      };
      if (config.multicast == 1 && config.split_k == 2)
        return launch(PersistentShape<In, warpgroups.value, tokens.value, 1, 2>{});
      if constexpr (warpgroups.value == 2)
        if (config.multicast == 2 && config.split_k == 1) return launch(PersistentShape<In, 2, tokens.value, 2, 1>{});
      return static_cast<int>(cudaErrorInvalidValue);
    });
  });
}

}  // namespace lamina
