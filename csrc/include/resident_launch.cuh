// The launch of the GEMM as a persistent kernel.
#pragma once

#include "resident_linear.cuh"
#include "stream_launch.cuh"

namespace lamina {

// Boxes of 64 columns and 64 rows; where kGated, 8 rows of each half of the weights in turn.
template <typename T, bool kGated>
inline cudaError_t describe_weight(CUtensorMap* map, const void* data, int64_t rows, int64_t columns) {
  if (kGated)
    return encode_map<T, 4>(
        map, data,
        {{columns, 8, 2, rows / 16}, {columns, rows / 2 * columns, 8 * columns}, {kColumns, 8, 2, kRows / 16}});
  return encode_map<T, 4>(map, data,
                          {{columns, rows, 1, 1}, {columns, rows * columns, rows * columns}, {kColumns, kRows, 1, 1}});
}

template <typename T, typename S, bool kGated>
int launch_resident(const Linear<T>& p, const void* weight_data, const void* x_data, int64_t x_stride, int64_t clusters,
                    cudaStream_t stream) {
  CUtensorMap weight, x;
  const auto kernel = resident_linear_kernel<T, S, kGated>;
  cudaError_t error = describe_weight<T, kGated>(&weight, weight_data, p.n, p.k);
  if (error == cudaSuccess) error = describe<T>(&x, x_data, p.tokens, p.k, x_stride, p.copied);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int64_t strips = ceil_div(p.n, kRows) * ceil_div(p.tokens, S::kTokenRows);
  const auto useful = static_cast<unsigned>(smaller(clusters, strips));
  return launch_clusters_early(S::kCluster, kernel, dim3(useful * S::kCluster), dim3(S::kAllThreads), S::kBytes, stream,
                               weight, x, p);
}

// Results are written 8 at once. Up to 192 rows of x need less than a tile for 256.
template <typename T, bool kGated>
int resident_linear(const Linear<T>& p, const void* weight, const void* x, int64_t x_stride, const Cut& cut,
                    cudaStream_t stream) {
  if (p.n % (kGated ? 16 : 8) != 0) return cudaErrorInvalidValue;
  return with_constant<1, 2>(cut.groups, [&](auto groups) {
    return with_constant<128, 192, 256>(p.tokens > 128 && p.tokens <= 192 ? 192 : cut.tokens, [&](auto tokens) {
      const auto launch = [&](auto shape) -> int {
        using S = decltype(shape);
        Linear<T> whole = p;
        whole.copied = rows_to_copy<S>(p.tokens);
        return launch_resident<T, S, kGated>(whole, weight, x, x_stride, cut.clusters, stream);
      };
      if (cut.share == 1 && cut.split == 2) return launch(ResidentShape<groups.value, tokens.value, 1, 2>{});
      if constexpr (groups.value == 2)
        if (cut.share == 2 && cut.split == 1) return launch(ResidentShape<2, tokens.value, 2, 1>{});
      return static_cast<int>(cudaErrorInvalidValue);
    });
  });
}

}  // namespace lamina
