// Norms of row_norm.cuh whose results are rounded as there, and quantized.
#pragma once

#include "quantize.cuh"
#include "row_norm.cuh"

namespace lamina {

template <typename Format, typename T, int kVecs, Sum kSum, Weight kWeight>
__global__ void __launch_bounds__(kMaxThreads) quantize_normed_rows(RowNorm<T> norm, QuantizedRows to) {
  Vec<T, 8> results[kVecs] = {};
  norm_row<kVecs, kSum, kWeight>(norm, [&](int i, int, const Vec<T, 8>& result) { results[i] = result; });
  store_row<Format>(to, blockIdx.x, results);
}

// Rows of 16-byte vectors; cudaErrorInvalidValue for such as no block holds.
template <typename Format, Sum kSum, Weight kWeight, typename T>
int launch_quantized_norm(const RowNorm<T>& norm, const QuantizedRows& to, cudaStream_t stream) {
  if (norm.rows == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(norm.rows);
  const int64_t vecs = norm.hidden / kVecWidth<T>, vecs_each = ceil_div(vecs, kThreads);  // as in launch_norm
  const auto threads = [&](int64_t each) { return ceil_div(ceil_div(vecs, each), kWarp) * kWarp; };
  const auto launch = [&](auto kernel, int64_t block) {
    return static_cast<int>(launch_pdl(kernel, dim3(rows), dim3(static_cast<unsigned>(block)), stream, norm, to));
  };
  if (threads(4) > kMaxThreads) return cudaErrorInvalidValue;
  if (vecs_each <= 1) return launch(quantize_normed_rows<Format, T, 1, kSum, kWeight>, threads(1));
  if (vecs_each <= 2) return launch(quantize_normed_rows<Format, T, 2, kSum, kWeight>, threads(2));
  return launch(quantize_normed_rows<Format, T, 4, kSum, kWeight>, threads(4));
}

template <Sum kSum, typename T>
int quantized_norm(int64_t format, bool zero_centred, const RowNorm<T>& norm, const QuantizedRows& to,
                   cudaStream_t stream) {
  return with_format(format, [&](auto one) {
    using Format = decltype(one);
    return zero_centred ? launch_quantized_norm<Format, kSum, Weight::kZeroCentred>(norm, to, stream)
                        : launch_quantized_norm<Format, kSum, Weight::kPlain>(norm, to, stream);
  });
}

}  // namespace lamina
