// The launch of the streaming GEMM.
#pragma once

#include "cut.cuh"
#include "launch.cuh"
#include "launch_shared.cuh"
#include "stream_linear.cuh"
#include "tensor_map.cuh"

namespace lamina {

// Boxes of 64 columns and box_rows rows.
template <typename T>
inline cudaError_t describe(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int64_t stride,
                            int box_rows) {
  return encode_map<T, 2>(map, data, {{columns, rows}, {stride}, {kColumns, box_rows}});
}

// Calls function with a value of the type that the code stands for, of those that the matrix units take here.
template <typename Function>
inline int with_dtype16(int64_t code, const Function& function) {
  if (code == 1) return function(__nv_bfloat16{});
  if (code == 2) return function(__half{});
  return cudaErrorInvalidValue;
}

template <typename T, int kGroups, int kTokens, bool kGated>
int launch_linear(Linear<T> p, const void* weight_data, const void* x_data, int64_t x_stride, cudaStream_t stream) {
  using S = Shape<kGroups, kTokens>;
  CUtensorMap weight, x;
  const auto kernel = linear_kernel<T, kGroups, kTokens, kGated>;
  p.copied = 8 * narrow(ceil_div(smaller(p.tokens, kTokens), 8 * p.share));
  cudaError_t error = describe<T>(&weight, weight_data, p.n, p.k, p.k, kRows);
  if (error == cudaSuccess) error = describe<T>(&x, x_data, p.tokens, p.k, x_stride, p.copied);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int64_t tile_width = kGated ? S::kBlockRows / 2 : S::kBlockRows, width = kGated ? p.n / 2 : p.n;
  const auto cluster = static_cast<unsigned>(p.share * p.split);
  const dim3 grid(static_cast<unsigned>(ceil_div(width, tile_width * p.share)) * cluster,
                  static_cast<unsigned>(ceil_div(p.tokens, kTokens)));
  return launch_clusters_early(cluster, kernel, grid, dim3(S::kThreads + kWarp), S::bytes(p.stages), stream, weight, x,
                               p);
}

}  // namespace lamina
