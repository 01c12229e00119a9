// The same of decode steps, behind a projection that promises that x is complete when this kernel begins (pdl.cuh).
//
// All but y is there while the projection still runs, so by its end a thread has what is to be added to its outputs:
// then it reads y, adds, and writes. A cluster has up to 8 tokens of a slot. The sums are those of the other kernel, in
// the same order.
#pragma once

#include "lora_outputs.cuh"

namespace lamina {

// Neighbouring outputs, as they lie in memory: those of a thread.
template <typename T, int kRows>
struct alignas(sizeof(T) * kRows) Neighbours {
  T of[kRows];
};

// A thread's rows of B of one part, of which 16 ranks are held where there are few.
template <typename T, int kRows>
struct EarlyRows {
  static constexpr int kHeld = kRows <= 2 ? kHeldVecs : 0;
  const T* from;
  bool exist;
  Vec<T, 8> held[kRows][kHeldVecs];

  __device__ __forceinline__ EarlyRows(const Lora<T>& p, const LoraTile& tile, int slot) {
    const int row = tile.first + static_cast<int>(threadIdx.x) * kRows;
    from = p.b + (static_cast<int64_t>(slot) * p.num_rows + row) * p.rank;
    exist = row < tile.last;
  }

  __device__ __forceinline__ void prefetch(const Lora<T>& p) const {
    constexpr int kLine = 128 / static_cast<int>(sizeof(T));
    for (int i = 0; exist && i < kRows * p.rank; i += kLine) prefetch_to_l2(from + i);
  }

  __device__ __forceinline__ Vec<T, 8> load_vec(const Lora<T>& p, int r, int vec) const {
    return load_if(exist && vec * 8 < p.rank, from + r * p.rank + vec * 8);
  }

  __device__ __forceinline__ void hold(const Lora<T>& p) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[r][i] = load_vec(p, r, i);
  }

  // Their products with up to 4 tokens' totals, which begin here.
  __device__ __forceinline__ void multiply(const Lora<T>& p, uint32_t totals, int count,
                                           float (&sums)[kRows][kHalfRound]) const {
    const int token_bytes = rank_tiles<1>(p) * kTileRank * 4, vecs = p.rank / 8;
    Vec<T, 8> rows[kRows];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (i >= vecs) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        rows[r] = held[r][i];
        keep_packed(rows[r]);
      }
      add_vec<kRows>(sums, rows, totals + static_cast<uint32_t>(i * 32), token_bytes, count);
    }
#pragma unroll 1
    for (int i = kHeld; i < vecs; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = load_vec(p, r, i);
      add_vec<kRows>(sums, rows, totals + static_cast<uint32_t>(i * 32), token_bytes, count);
    }
  }
};

// Up to 4 tokens of a group, this thread's outputs of each.
struct EarlyTokens {
  int tokens[kHalfRound], count, row;

  __device__ __forceinline__ EarlyTokens(const LoraTile& tile, const TokenGroup& group, int first, int rows)
      : row(tile.first + static_cast<int>(threadIdx.x) * rows) {
    count = row < tile.last ? min(kHalfRound, group.count - first) : 0;
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) tokens[t] = __shfl_sync(kAllLanes, group.token, (first + t) % 32);
  }
};

// Writes y, and the sums by a scale in addition where that is not 0.
template <int kRows, typename T>
__device__ __forceinline__ void write_early(const Lora<T>& p, const EarlyTokens& own, float scale,
                                            const float (&sums)[kRows][kHalfRound]) {
  using Run = Neighbours<T, kRows>;
  Run runs[kHalfRound];
#pragma unroll
  for (int t = 0; t < kHalfRound; ++t)
    if (t < own.count) runs[t] = *reinterpret_cast<const Run*>(p.y + own.tokens[t] * p.y_token + own.row);
#pragma unroll
  for (int t = 0; t < kHalfRound; ++t) {
    if (t >= own.count) break;
    if (scale != 0.0f) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        runs[t].of[r] = static_cast<T>(fmaf(scale, sums[r][t], static_cast<float>(runs[t].of[r])));
    }
    *reinterpret_cast<Run*>(p.out + static_cast<int64_t>(own.tokens[t]) * p.num_rows + own.row) = runs[t];
  }
}

// The totals of a group's tokens, in each block of the cluster; meanwhile its threads load their rows of B.
template <int kChunks, typename T, int kRows>
__device__ __forceinline__ void shrink_early(const Lora<T>& p, const HeldChunks<T, kChunks, 1>& held,
                                             const TokenGroup& group, int block, const ClusterMemory& at,
                                             uint32_t parity, EarlyRows<T, kRows>& rows) {
  const int tiles = rank_tiles<1>(p), own = lane_index() / 4;
  if (threadIdx.x == 0) arrive_expecting(at.sent, static_cast<uint32_t>(tiles * kSegments * kTileSums * 4));
  arrive_at_cluster();  // nothing of a round before is read any more
  const int token = __shfl_sync(kAllLanes, group.token, own);
  shrink_round(p, held, p.x + static_cast<int64_t>(token) * p.x_token, own < group.count, block, at.partials);
  __syncthreads();
  wait_for_cluster();
  send_sums(at, tiles, block);
  rows.hold(p);
  wait_barrier(at.sent, parity);
  add_received(at, tiles);
  __syncthreads();
}

template <int kChunks, int kRows, typename T>
__device__ __forceinline__ void add_adapters_early(const Lora<T>& p, const ClusterMemory& at) {
  const auto place = static_cast<int>(blockIdx.x) / kSegments, block = static_cast<int>(blockIdx.x) % kSegments;
  const LoraTile tile = tile_of<kSegments>(p, place % p.num_tiles, block);
  const TokenWindow window = window_of<kRound>(p, place / p.num_tiles / p.num_groups * kWindow);
  const int groups = __popc(window.leaders), first = place / p.num_tiles % p.num_groups;
  if (first >= groups) return;
  if (threadIdx.x == 0) {
    init_barrier(at.sent, 1);
    publish_barriers();
  }
  uint32_t parity = 0;
  for (int index = first; index < groups; index += p.num_groups) {
    const TokenGroup group = group_of<kRound>(window, index);
    const float scale = group.slot < 0 ? 0.0f : p.scales[group.slot * p.num_parts + tile.part];
    EarlyRows<T, kRows> rows(p, tile, max(group.slot, 0));
    HeldChunks<T, kChunks, 1> held;
    if (group.slot >= 0) {
      held.load_chunks(p, tile, group.slot, block);
      rows.prefetch(p);
    }
    asm volatile("" ::: "memory");  // these loads do not wait for the scale
    if (scale != 0.0f) {
      shrink_early(p, held, group, block, at, parity, rows);
      parity ^= 1;
    }
#pragma unroll 1
    for (int half = 0; half * kHalfRound < group.count; ++half) {
      const EarlyTokens own(tile, group, half * kHalfRound, kRows);
      float sums[kRows][kHalfRound] = {};
      const auto behind = static_cast<uint32_t>(half * kHalfRound * rank_tiles<1>(p) * kTileRank * 4);
      if (scale != 0.0f) rows.multiply(p, at.totals + behind, own.count, sums);
      wait_for_predecessor();  // returns at once but for the first time
      write_early(p, own, scale, sums);
    }
  }
}

template <typename T, int kChunks, int kRows>
__global__ void __launch_bounds__(kLoraThreads, kChunks <= 2 && kRows <= 4 ? 3 : 2)
    lora_early_kernel(const __grid_constant__ Lora<T> p) {
  extern __shared__ uint8_t shared[];
  start_successor();
  add_adapters_early<kChunks, kRows>(p, ClusterMemory(shared_address(shared), rank_tiles<1>(p)));
}

// Outputs that a thread may have as neighbours: they lie at a multiple of their size in y and in the result, and none
// is of another part.
template <typename T>
int most_neighbours(const Lora<T>& p) {
  uintptr_t all = reinterpret_cast<uintptr_t>(p.y) / sizeof(T) | reinterpret_cast<uintptr_t>(p.out) / sizeof(T) | 8;
  all |= static_cast<uintptr_t>(p.y_token);
  for (int part = 0; part < p.num_parts; ++part) all |= static_cast<uintptr_t>(p.rows[part]);
  return static_cast<int>(all & -all);
}

// As divide_by_clusters; a token without a slot is written by a cluster that has had others.
template <typename T>
int divide_early(Lora<T>& p, int num_slots, int most_rows, int blocks) {
  const int rows = divide_by_clusters(p, num_slots, most_rows, blocks);
  p.num_groups = p.num_groups < num_slots ? p.num_groups : num_slots;
  return rows;
}

}  // namespace lamina
