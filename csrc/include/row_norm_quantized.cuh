// Norms of row_norm.cuh whose results are rounded as there, and quantized.
#pragma once

#include "quantize.cuh"
#include "row_norm.cuh"

namespace lamina {

constexpr int kManyNormedRows = 256;  // beyond, it pays to have more blocks at once, of fewer registers

// Of many rows: none rehearses, whose second copy takes registers.
template <typename Format, typename T, int kVecs, Sum kSum, Weight kWeight>
__global__ void __launch_bounds__(kMaxThreads, kVecs == 1 ? 3 : 1)
    quantize_many_normed_rows(RowNorm<T> norm, QuantizedRows to) {
  Vec<T, 8> weight[kVecs], results[kVecs];
  start_successor();
  load_weights(norm, weight);
  norm_row<kVecs, kSum, kWeight>(norm, weight, true, [&](int i, int, const Vec<T, 8>& result) { results[i] = result; });
  store_row<Format>(to, blockIdx.x, results, true);
}

template <typename Format, typename T, int kVecs, Sum kSum, Weight kWeight>
__global__ void __launch_bounds__(kMaxThreads) quantize_normed_rows(RowNorm<T> norm, QuantizedRows to) {
  Vec<T, 8> weight[kVecs];
  start_successor();
  load_weights(norm, weight);
  rehearse([&](bool counts) {
    Vec<T, 8> results[kVecs] = {};
    norm_row<kVecs, kSum, kWeight>(norm, weight, counts,
                                   [&](int i, int, const Vec<T, 8>& result) { results[i] = result; });
    store_row<Format>(to, blockIdx.x, results, counts);
    __syncthreads();  // what a block adds up lies where the last sum lay
  });
}

// Rows of 16-byte vectors; cudaErrorInvalidValue for such as no block holds.
template <typename Format, Sum kSum, Weight kWeight, typename T>
int launch_quantized_norm(const RowNorm<T>& norm, const QuantizedRows& to, cudaStream_t stream) {
  if (norm.rows == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(norm.rows);
  const int64_t vecs = norm.hidden / kVecWidth<T>;
  if (!block_holds(vecs)) return cudaErrorInvalidValue;
  return with_held_row(vecs, [&](auto each, int64_t threads) {
    const dim3 block(static_cast<unsigned>(threads));
    const auto kernel = rows <= kManyNormedRows ? quantize_normed_rows<Format, T, each.value, kSum, kWeight>
                                                : quantize_many_normed_rows<Format, T, each.value, kSum, kWeight>;
    return static_cast<int>(launch_pdl(kernel, dim3(rows), block, stream, norm, to));
  });
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
