// y + scale * B (A x) by the slot of each token: shrunk to a few numbers and expanded by one launch.
//
// A cluster of blocks has some neighbouring tokens and some outputs of one part. Each block sums segments of the
// columns, all blocks add the segments up in their order, through each other's shared memory, and each expands outputs
// of its own. GPUs without clusters have one block sum all segments, in the same order: a token's bits depend on its
// columns and rank, and not on who sums what.
#pragma once

#include "hopper.cuh"
#include "lora_shape.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kShrunkRows = 2;  // rows of A that a warp sums at a time

// Columns [first, last) of a segment, in vectors.
struct Segment {
  int first, last;
};

template <int kWidth, typename T>
__device__ __forceinline__ Segment segment_of(const Lora<T>& p, int index) {
  const int vecs = p.columns / kWidth, each = (vecs + kSegments - 1) / kSegments;
  return {index * each, min((index + 1) * each, vecs)};
}

template <typename T>
__device__ __forceinline__ void prefetch_rows(const T* from, int rows, int64_t stride, int columns) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  const int lines = (columns + kLine - 1) / kLine;
  for (int i = static_cast<int>(threadIdx.x); i < rows * lines; i += kLoraThreads)
    prefetch_to_l2(from + i / lines * stride + i % lines * kLine);
}

// What a block reads of an adapter, before the projection is done: no kernel of a step writes it.
template <int kWidth, int kCluster, typename T>
__device__ __forceinline__ void prefetch_adapter(const Lora<T>& p, const LoraTile& tile, int token, int block) {
  const int slot = p.slots[token];
  if (slot < 0) return;
  for (int index = block; index < kSegments; index += kCluster) {
    const Segment segment = segment_of<kWidth>(p, index);
    prefetch_rows(matrix_a(p, slot, tile.part) + segment.first * kWidth, p.rank, p.columns,
                  (segment.last - segment.first) * kWidth);
  }
  const T* own = p.b + (static_cast<int64_t>(slot) * p.num_rows + tile.first) * p.rank;
  prefetch_rows(own, 1, 0, (tile.last - tile.first) * p.rank);
}

// Sums of a segment's columns, for `count` tokens from this one: to[token][row of A].
template <int kWidth, int kTokens, typename T>
__device__ __forceinline__ void shrink(const Lora<T>& p, const T* a, const T* x, const Segment& segment, int count,
                                       float* to) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp * kShrunkRows; row < p.rank; row += kLoraWarps * kShrunkRows) {
    float sums[kShrunkRows][kTokens] = {};
    for (int vec = segment.first + lane; vec < segment.last; vec += 32) {
      float weights[kShrunkRows][kWidth], given[kWidth];
#pragma unroll
      for (int i = 0; i < kShrunkRows; ++i) {
        const int64_t own = min(row + i, p.rank - 1);
        to_floats(weights[i], load<kWidth>(a + own * p.columns + vec * kWidth));
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) break;
        to_floats(given, load<kWidth>(x + t * p.x_token + vec * kWidth));
#pragma unroll
        for (int i = 0; i < kShrunkRows; ++i)
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sums[i][t] = fmaf(weights[i][j], given[j], sums[i][t]);
      }
    }
#pragma unroll
    for (int i = 0; i < kShrunkRows; ++i)
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) break;
        for (int offset = 16; offset > 0; offset /= 2) sums[i][t] += __shfl_xor_sync(kAllLanes, sums[i][t], offset);
        if (lane == 0) to[t * p.width() + row + i] = sums[i][t];
      }
  }
}

// Adds the segments of all blocks up, `fours` groups of four numbers; `to` is behind this block's own segments.
template <int kCluster>
__device__ __forceinline__ void add_segments(uint32_t sums, int segment_floats, int fours, float* to) {
  for (int i = static_cast<int>(threadIdx.x); i < fours; i += kLoraThreads) {
    float4 total = {};
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      const auto at = sums + static_cast<uint32_t>((segment / kCluster * segment_floats + i * 4) * 4);
      const float4 four = kCluster == 1 ? load_four(at) : load_from_peer(at, static_cast<uint32_t>(segment % kCluster));
      total.x += four.x, total.y += four.y, total.z += four.z, total.w += four.w;
    }
    to[i * 4] = total.x, to[i * 4 + 1] = total.y, to[i * 4 + 2] = total.z, to[i * 4 + 3] = total.w;
  }
}

template <int kWidth>
__device__ __forceinline__ void shrunk_floats(float (&to)[kWidth], uint32_t from) {
  if constexpr (kWidth == 1) {
    to[0] = *shared_floats(from);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = load_four(from + i * 4);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }
}

// The outputs of a tile, for `count` tokens from this one.
template <int kWidth, int kTokens, typename T>
__device__ __forceinline__ void expand(const Lora<T>& p, const LoraTile& tile, int slot, float scale, int token,
                                       int count, uint32_t shrunk) {
  for (int row = tile.first + static_cast<int>(threadIdx.x); row < tile.last; row += kLoraThreads) {
    const T* own = p.b + (static_cast<int64_t>(slot) * p.num_rows + row) * p.rank;
    float sums[kTokens] = {};
    for (int place = 0; place < p.rank; place += kWidth) {
      float weights[kWidth], values[kWidth];
      to_floats(weights, load<kWidth>(own + place));
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) break;
        shrunk_floats(values, shrunk + static_cast<uint32_t>((t * p.width() + place) * 4));
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[t] = fmaf(weights[j], values[j], sums[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) break;
      const auto given = static_cast<float>(p.y[(token + t) * p.y_token + row]);
      p.out[static_cast<int64_t>(token + t) * p.num_rows + row] = static_cast<T>(fmaf(scale, sums[t], given));
    }
  }
}

template <typename T>
__device__ __forceinline__ void copy_outputs(const Lora<T>& p, const LoraTile& tile, int64_t token) {
  for (int row = tile.first + static_cast<int>(threadIdx.x); row < tile.last; row += kLoraThreads)
    p.out[token * p.num_rows + row] = p.y[token * p.y_token + row];
}

// Neighbouring tokens with one slot, whose part changes something. All blocks of a cluster call it together.
template <int kWidth, int kTokens, int kCluster, typename T>
__device__ __forceinline__ void add_adapter(const Lora<T>& p, const LoraTile& tile, int slot, float scale, int token,
                                            int count, int block, uint32_t memory) {
  const int floats = kTokens * p.width();  // of a segment
  const auto shrunk = memory + static_cast<uint32_t>(kSegments / kCluster * floats * 4);
  for (int index = block; index < kSegments; index += kCluster)
    shrink<kWidth, kTokens>(p, matrix_a(p, slot, tile.part), p.x + token * p.x_token, segment_of<kWidth>(p, index),
                            count, shared_floats(memory) + index / kCluster * floats);
  kCluster > 1 ? sync_cluster() : __syncthreads();
  add_segments<kCluster>(memory, floats, count * p.width() / 4, shared_floats(shrunk));
  __syncthreads();
  if (kCluster > 1) arrive_at_cluster();  // nobody reads another's sums any more
  expand<kWidth, kTokens>(p, tile, slot, scale, token, count, shrunk);
  kCluster > 1 ? wait_for_cluster() : __syncthreads();
}

template <typename T, int kWidth, int kTokens, int kCluster>
__global__ void __launch_bounds__(kLoraThreads) lora_kernel(const __grid_constant__ Lora<T> p) {
  extern __shared__ uint8_t shared[];
  const uint32_t memory = shared_address(shared);
  const auto index = static_cast<int>(blockIdx.x);
  const int block = index % kCluster, cluster = index / kCluster;
  const LoraTile tile = tile_of<kCluster>(p, cluster % p.num_tiles, block);
  int token = cluster / p.num_tiles * kTokens;
  const int end = min(token + kTokens, p.tokens);
  start_successor();
  if (p.tokens <= kFewTokens) prefetch_adapter<kWidth, kCluster>(p, tile, token, block);
  wait_for_predecessor();
  while (token < end) {
    const int slot = p.slots[token];
    int count = 1;
    while (token + count < end && p.slots[token + count] == slot) ++count;
    const float scale = slot < 0 ? 0.0f : p.scales[slot * p.num_parts + tile.part];
    if (scale != 0.0f)
      add_adapter<kWidth, kTokens, kCluster>(p, tile, slot, scale, token, count, block, memory);
    else
      for (int t = 0; t < count; ++t) copy_outputs(p, tile, token + t);
    token += count;
  }
}

template <int kCluster, typename T>
size_t lora_memory(const Lora<T>& p, int tokens) {
  return sizeof(float) * (kSegments / kCluster + 1) * tokens * p.width();
}

}  // namespace lamina
