// Launch of the split-K GEMM.
#pragma once

#include "gemm_config.cuh"
#include "launch.cuh"
#include "launch_shared.cuh"
#include "split_k_gemm.cuh"
#include "tensor_map.cuh"

namespace lamina {

// The tensor map of a row-major matrix: boxes of 128 bytes by box_rows rows.
template <typename T>
inline cudaError_t make_matrix_map(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int64_t stride,
                                   int box_rows) {
  return encode_tensor_map<T, 2>(map, data, {{columns, rows}, {stride}, {kTileColumns<T>, box_rows}});
}

template <int kWarpgroups, int kTokens, bool kGated, typename In, typename Out>
int launch_split_k_gemm(Linear<In, Out> p, const void* weight_data, const void* x_data, int64_t x_stride,
                        cudaStream_t stream) {
  using S = SplitKShape<In, kWarpgroups, kTokens>;
  CUtensorMap weight, x;
  const auto kernel = split_k_gemm_kernel<In, Out, kWarpgroups, kTokens, kGated>;
  p.box_rows = 8 * narrow(ceil_div(smaller(p.tokens, kTokens), 8 * p.multicast));
  cudaError_t error = make_matrix_map<In>(&weight, weight_data, p.n, p.k, p.k, kRows);
  if (error == cudaSuccess) error = make_matrix_map<In>(&x, x_data, p.tokens, p.k, x_stride, p.box_rows);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int64_t tile_width = kGated ? S::kBlockRows / 2 : S::kBlockRows, width = kGated ? p.n / 2 : p.n;
  const auto cluster = static_cast<unsigned>(p.multicast * p.split_k);
  const dim3 grid(static_cast<unsigned>(ceil_div(width, tile_width * p.multicast)) * cluster,
                  static_cast<unsigned>(ceil_div(p.tokens, kTokens)));
  return launch_clusters_pdl(cluster, kernel, grid, dim3(S::kThreads + kWarp), S::bytes(p.stages), stream, weight, x,
                             p);
}

}  // namespace lamina
