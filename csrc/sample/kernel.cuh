// Token ids out of logits: the largest, or a draw after temperature, top-k, top-p and min-p.
//
// Two launches for every row of a batch, whatever mixture of greedy, random and filtered it is. scan_chunks reads the
// logits once, with as many blocks as there are, and leaves the largest logit of each chunk of 256 tokens and, for
// rows that are drawn, the chunk's summed odds. choose_tokens, one block a row, needs no more of a row that is greedy
// or not filtered than those numbers and one chunk.
#pragma once

#include "pdl.cuh"
#include "select.cuh"

namespace lamina {

constexpr int kScanWarps = 8;
constexpr int kBroken = -1;       // in index of a token where logits are not finite; the formula has the same
constexpr int kRowsAtOnce = 100;  // fewer, and every row has a multiprocessor from the beginning

// kChunks chunks a warp, read before the first is looked at.
template <typename T, int kWidth, int kChunks>
__global__ void __launch_bounds__(kScanWarps* kWarp) scan_chunks(Sample<T> args) {
  wait_for_predecessor();
  start_successor();  // not before: choose_tokens reads what a kernel ahead may have written
  const int row = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.x * kScanWarps + threadIdx.x / kWarp) * kChunks;
  Piece<T, kWidth> pieces[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c < args.num_chunks) pieces[c].read(args, row, first + c);
  }
  const Bans bans(args, row);
  const float temperature = args.temperature[row];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c >= args.num_chunks) return;
    float values[kEach];
    pieces[c].unpack(values, args, bans, first + c);
    const float2 summary = summary_of(values, temperature);
    if (threadIdx.x % kWarp == 0) {
      args.chunks[static_cast<int64_t>(row) * args.num_chunks + first + c] = summary;
    }
  }
}

// A number that is the larger the larger the score, and among equal scores the lower the index; NaN is largest.
__device__ __forceinline__ uint64_t entry(float score, int index) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 equals 0
  const uint32_t key = score != score ? ~0u : (bits >> 31 ? ~bits : bits | 0x80000000u);
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ int index_of(uint64_t winner) { return static_cast<int>(~static_cast<uint32_t>(winner)); }

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t best_of_warp(uint64_t best) { return combine_warp(best, larger); }

__device__ __forceinline__ uint64_t best_of_block(uint64_t best, uint64_t (&partial)[kWarps]) {
  best = combine_warps(best, partial, kWarps, uint64_t{0}, larger);
  __syncthreads();
  return best;
}

// The first chunk to finish a race in which each finishes at its noise over its mass.
__device__ __forceinline__ int race_chunks(const float* masses, int num_chunks, const Noise& noise,
                                           uint64_t (&partial)[kWarps]) {
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < num_chunks; i += kBlock) {
    best = larger(best, entry(__fdiv_rn(masses[i], noise.at(-1 - i)), i));
  }
  return index_of(best_of_block(best, partial));
}

// Which row a block takes: those with filters come first, as they take longest and blocks begin in order.
template <typename T>
__device__ __forceinline__ int row_of_block(const Sample<T>& args, Shared& shared) {
  const int block = static_cast<int>(blockIdx.x), row = static_cast<int>(threadIdx.x), num_rows = args.num_rows;
  if (num_rows < kRowsAtOnce || num_rows > kBlock) return block;
  const int lane = row % kWarp, warp = row / kWarp;
  const bool is_long = row < num_rows && args.temperature[row] > 0.0f &&
                       (args.top_k[row] > 0 || args.top_p[row] < 1.0f || args.min_p[row] > 0.0f);
  const unsigned longs = __ballot_sync(kAllLanes, is_long);
  if (lane == 0) shared.totals[warp] = static_cast<uint32_t>(__popc(longs));
  __syncthreads();
  const int count = lane < kWarps ? static_cast<int>(shared.totals[lane]) : 0;
  const auto before = static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? count : 0));
  const auto all = static_cast<int>(__reduce_add_sync(kAllLanes, count));
  const int index = before + __popc(longs & ((1u << lane) - 1));  // among the long rows
  if (row < num_rows && block == (is_long ? index : all + row - index)) shared.row = row;
  __syncthreads();
  return shared.row;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kBlock, 1) choose_tokens(Sample<T> args) {
  extern __shared__ uint4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* gaps = reinterpret_cast<float*>(&shared + 1);
  const int row = row_of_block(args, shared);
  const Bans bans(args, row);
  const float2* chunks = args.chunks + static_cast<int64_t>(row) * args.num_chunks;
  const int64_t target = args.target_row(row);
  const Noise noise(args.seeds[row], args.positions[target]);
  const float temperature = args.temperature[row], sharpness = sharpness_of(temperature);
  wait_for_predecessor();
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
    best = larger(best, entry(chunks[i].x, i));
  }
  int chunk = index_of(best_of_block(best, shared.partial));
  const float largest = chunks[chunk].x + 0.0f;  // not -0, so that no gap is
  const bool is_sound = fabsf(largest) < INFINITY, is_drawn = temperature > 0.0f && is_sound;
  const Filter<T, kWidth> filter{args, shared, gaps, gaps + args.num_chunks, row, bans, largest, sharpness};
  Rank last = 0;
  if (is_drawn) {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
      const float2 chunk_of = chunks[i];
      gaps[i] = filter.gap_of(chunk_of.x);
      filter.masses[i] = chunk_of.y * odds_of(gaps[i]);
    }
    __syncthreads();
    last = filter.apply();
    chunk = race_chunks(filter.masses, args.num_chunks, noise, shared.partial);
  }
  if (threadIdx.x >= kWarp) return;
  float values[kEach];
  Piece<T, kWidth> piece;
  piece.read(args, row, chunk);
  piece.unpack(values, args, bans, chunk);
  best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int id = chunk * kChunk + piece.token(i);
    float score = values[i];
    if (is_drawn) {
      const float gap = filter.gap_of(values[i]);
      score = __fdiv_rn(rank_of(gap, id) <= last ? expf(-gap) : 0.0f, noise.at(id));
    }
    best = larger(best, entry(score, id));
  }
  const int token = index_of(best_of_warp(best));
  if (threadIdx.x == 0) args.out[target] = is_sound ? token : kBroken;
}

}  // namespace lamina
