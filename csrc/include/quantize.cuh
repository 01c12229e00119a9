// Rows quantized to a format of one byte: a scale a row or 128 of its columns, and values x / scale.
#pragma once

#include <type_traits>

#include "block_cluster.cuh"
#include "pdl.cuh"
#include "quantized_values.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kScaledColumns = 128;                             // of a group
constexpr int kQuantizeThreads = 512, kMostQuantizeBlocks = 8;  // of a row
constexpr int kFewQuantizedRows = 32;                           // of one vector a thread
constexpr int kManyQuantizedRows = 128;  // beyond, it pays to have more blocks at once, of fewer registers

// Where quantized rows go. Scales: [rows], or [groups, rows] where rows have groups.
struct QuantizedRows {
  uint8_t* out;
  float* scale;
  int64_t rows, columns;
  bool is_grouped;
};

// Calls function with a value of the format that the code stands for; custom_ops/_shared/quantized.py has the same
// codes.
template <typename Function>
inline int with_format(int64_t code, const Function& function) {
  if (code == 0) return function(Float8{});
  if (code == 1) return function(Int8{});
  return cudaErrorInvalidValue;
}

// Every thread of a block of whole warps gets the largest.
__device__ __forceinline__ float block_peak(float peak) {
  __shared__ float partial[kWarp];
  return combine_warps(peak, partial, static_cast<int>(blockDim.x / kWarp), 0.0f, max_or_nan);
}

// A thread's vector of a row, in its group; all lanes of a warp call it. Where it does not count, nothing is written.
template <typename Format, typename T>
__device__ __forceinline__ void store_grouped(const QuantizedRows& to, int64_t row, int vec, const Vec<T, 8>& values,
                                              bool counts) {
  const bool is_there = vec < to.columns / 8;
  const float scale = scale_of<Format>(lanes_peak<kScaledColumns / 8>(is_there ? peak_of(values) : 0.0f));
  if (!is_there) return;
  if (vec % (kScaledColumns / 8) == 0 && counts) to.scale[vec / (kScaledColumns / 8) * to.rows + row] = scale;
  store_bytes<Format>(to.out + row * to.columns + vec * 8, values, scale, counts);
}

// A block's row, of which a thread has kVecs vectors, blockDim.x apart.
template <typename Format, typename T, int kVecs>
__device__ __forceinline__ void store_row(const QuantizedRows& to, int64_t row, const Vec<T, 8> (&values)[kVecs],
                                          bool counts) {
  if (to.is_grouped) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) store_grouped<Format>(to, row, threadIdx.x + i * blockDim.x, values[i], counts);
    return;
  }
  const int vecs = static_cast<int>(to.columns / 8);
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    if (threadIdx.x + i * blockDim.x < vecs) peak = max_or_nan(peak, peak_of(values[i]));
  const float scale = scale_of<Format>(block_peak(peak));
  if (threadIdx.x == 0 && counts) to.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < vecs) store_bytes<Format>(to.out + row * to.columns + vec * 8, values[i], scale, counts);
  }
}

// Every thread of the cluster's blocks, a power of two, gets the largest, and is to wait_for_cluster before it ends,
// since others may still read what this block has.
__device__ __forceinline__ float cluster_peak(float peak, int blocks) {
  __shared__ float own;
  peak = block_peak(peak);
  if (threadIdx.x == 0) own = peak;
  sync_cluster();
  // each lane asks one of them, so that none is waited for behind another
  peak = lanes_peak<kMostQuantizeBlocks>(*in_peer(&own, static_cast<int>(threadIdx.x) % blocks));
  arrive_at_cluster();
  return peak;
}

// A row made of what Source::load(row, vec) gives, by a cluster of `blocks` blocks, kVecs vectors a thread. Where it
// does not count, what is read may be anything, and nothing is written.
template <typename Format, typename T, typename Source, int kVecs>
__device__ __forceinline__ void quantize_row(const Source& source, const QuantizedRows& to, int blocks, bool counts) {
  const int64_t row = blockIdx.x / blocks;
  const int first = static_cast<int>(blockIdx.x % blocks) * kQuantizeThreads + threadIdx.x;
  const int vecs = static_cast<int>(to.columns / 8);
  Vec<T, 8> values[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = first + i * blocks * kQuantizeThreads;
    if (vec < vecs) values[i] = source.load(row, vec);
  }
  if (to.is_grouped) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      store_grouped<Format>(to, row, first + i * blocks * kQuantizeThreads, values[i], counts);
    return;
  }
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    if (first + i * blocks * kQuantizeThreads < vecs) peak = max_or_nan(peak, peak_of(values[i]));
  const bool shares = blocks > 1;
  const float scale = scale_of<Format>(shares ? cluster_peak(peak, blocks) : block_peak(peak));
  if (first == 0 && counts) to.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = first + i * blocks * kQuantizeThreads;
    if (vec < vecs) store_bytes<Format>(to.out + row * to.columns + vec * 8, values[i], scale, counts);
  }
  if (shares) wait_for_cluster();
}

template <typename Format, typename T, typename Source, int kVecs>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(Source source, QuantizedRows to, int blocks) {
  start_successor();
  rehearse([&](bool counts) {
    if (counts) wait_for_predecessor();
    quantize_row<Format, T, Source, kVecs>(source, to, blocks, counts);
    __syncthreads();  // peaks lie where the last ones lay
  });
}

// Of many rows: none rehearses, whose second copy takes registers.
template <typename Format, typename T, typename Source, int kVecs>
__global__ void __launch_bounds__(kQuantizeThreads, kVecs <= 2 ? 3 : 1)
    quantize_many_kernel(Source source, QuantizedRows to, int blocks) {
  follow_predecessor();
  quantize_row<Format, T, Source, kVecs>(source, to, blocks, true);
}

// How many blocks, a power of two, have a row that one has in `needed` rounds of a vector a thread. Of few rows as many
// as have a vector a thread, which is soonest done; of many each thread has two, which are loaded at once, and
// fewer blocks wait for each other.
inline unsigned quantize_blocks(int64_t rows, int64_t needed) {
  const int64_t each = rows <= kFewQuantizedRows ? 1 : 2;
  unsigned blocks = 1;
  while (blocks * each < needed && blocks < kMostQuantizeBlocks) blocks *= 2;
  return blocks;
}

// cudaErrorInvalidValue for rows that are longer than eight blocks hold. A row's bits do not depend on how it is cut.
template <typename Format, typename T, typename Source>
int quantize_rows(const Source& source, const QuantizedRows& to, cudaStream_t stream) {
  if (to.rows == 0) return cudaSuccess;
  const int64_t needed = ceil_div(to.columns / 8, kQuantizeThreads);
  const unsigned blocks = quantize_blocks(to.rows, needed);
  const auto grid = static_cast<unsigned>(to.rows) * blocks;
  const auto launch = [&](auto vecs) {
    const auto kernel = to.rows <= kManyQuantizedRows ? quantize_kernel<Format, T, Source, vecs.value>
                                                      : quantize_many_kernel<Format, T, Source, vecs.value>;
    return static_cast<int>(launch_clusters_pdl(blocks, kernel, dim3(grid), dim3(kQuantizeThreads), 0, stream, source,
                                                to, static_cast<int>(blocks)));
  };
  if (needed <= blocks) return launch(std::integral_constant<int, 1>{});
  if (needed <= 2 * blocks) return launch(std::integral_constant<int, 2>{});
  if (needed <= 4 * blocks) return launch(std::integral_constant<int, 4>{});
  return cudaErrorInvalidValue;
}

}  // namespace lamina
