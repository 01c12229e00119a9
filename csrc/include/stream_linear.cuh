// out = x * weightᵀ for few rows of x: the weights stream through shared memory once, at the rate of device memory.
//
// A block takes kGroups * 64 rows of the weights, and the transposed product of them with kTokens rows of x. One warp
// asks the TMA for tiles, each group of four warps multiplies its 64 rows. Of a cluster, `share` blocks with
// neighbouring rows of the weights hand each other the tiles of x; `split` times as many share out the columns, and
// their products are added in the order of their ranks. Weights are asked for before the kernel that makes x has ended.
// Where kGated, the first half of the weights is a gate for the second.
#pragma once

#include "hopper.cuh"
#include "pdl.cuh"
#include "stream_shape.cuh"
#include "stream_sums.cuh"

namespace lamina {

// The first of the 64 weight rows of a group: where gate and up meet, half of a block's groups take gate rows.
template <int kGroups, bool kGated>
__device__ __forceinline__ int first_row(const Work& work, int group, int n) {
  static_assert(!kGated || kGroups % 2 == 0, "gate and up take as many groups");
  if (!kGated) return (work.tile * kGroups + group) * kRows;
  constexpr int kHalf = (kGroups + 1) / 2;
  return (work.tile * kHalf + group % kHalf) * kRows + (group < kHalf ? 0 : n / 2);
}

// The work of one warp.
template <typename T, int kGroups, int kTokens, bool kGated>
__device__ __forceinline__ void ask_for_tiles(const CUtensorMap* weight, const CUtensorMap* x, const Work& work,
                                              const Places& at, const Linear<T>& p, bool sends) {
  using S = Shape<kGroups, kTokens>;
  const bool asks = threadIdx.x % kWarp == 0;
  const uint64_t once = read_once(), often = read_often();
  const int stage_bytes = S::kTiles * (kGroups * kTileBytes + p.copied * work.share * kColumns * 2);
  const auto ask_weight = [&](int step, int stage) {
    const uint32_t to = at.tiles + stage * S::kStageBytes, barrier = at.full + stage * 8;
    arrive_expecting(barrier, stage_bytes);
#pragma unroll
    for (int i = 0; i < S::kTiles * kGroups; ++i) {
      const int column = step * S::kStep + i / kGroups * kColumns,
                row = first_row<kGroups, kGated>(work, i % kGroups, p.n);
      copy_box(to + i * kTileBytes, weight, column, row, barrier, once);
    }
  };
  const auto ask_x = [&](int step, int stage) {
    const uint32_t barrier = at.full + stage * 8;
    uint32_t to = at.tiles + stage * S::kStageBytes + S::kTiles * kGroups * kTileBytes;
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i, to += S::kXBytes) {
      const int column = step * S::kStep + i * kColumns;
      if (work.share == 1) {
        copy_box(to, x, column, work.token, barrier, often);
        continue;
      }
      const int row = work.part * p.copied;
      const auto peers = static_cast<uint16_t>(((1 << work.share) - 1) << (work.rank * work.share));
      copy_box_to_peers(to + row * kColumns * 2, x, column, work.token + row, barrier, peers, often);
    }
  };
  const int first = min(at.stages, work.end - work.begin);
  for (int i = 0; asks && i < first; ++i) ask_weight(work.begin + i, i);
  __syncwarp();
  if (work.share > 1 || sends) wait_for_cluster();  // every block has its barriers
  if (!asks) return;
  wait_for_predecessor();
  for (int i = 0; i < first; ++i) ask_x(work.begin + i, i);
  int stage = 0, parity = 0;
  for (int step = work.begin + first; step < work.end; ++step) {
    wait_barrier(at.empty + stage * 8, parity);
    ask_weight(step, stage);
    ask_x(step, stage);
    if (++stage == at.stages) stage = 0, parity ^= 1;
  }
}

template <typename T, int kGroups, int kTokens>
__device__ __forceinline__ void multiply_tiles(typename Shape<kGroups, kTokens>::Sums& sums, const Work& work,
                                               const Places& at) {
  using S = Shape<kGroups, kTokens>;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so the compiler sees that it is uniform
  const int lane = threadIdx.x % kWarp, steps = work.end - work.begin;
  int stage = 0, parity = 0, before = 0;
  for (int step = 0; step < steps; ++step) {
    wait_barrier(at.full + stage * 8, parity);
    const uint32_t tiles = at.tiles + stage * S::kStageBytes + group * kTileBytes;
    const uint32_t x = at.tiles + stage * S::kStageBytes + S::kTiles * kGroups * kTileBytes;
    begin_products();
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      const uint64_t left = tile_descriptor(tiles + i * kGroups * kTileBytes);
      const uint64_t right = tile_descriptor(x + i * S::kXBytes);
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) multiply<kTokens>(sums, left + 2 * k, right + 2 * k, T{});
    }
    commit_products();
    wait_for_products<1>();
    if (step > 0 && lane < work.share) {  // whoever writes into the tiles must know that they have been read
      const uint32_t empty = at.empty + before * 8;
      work.share == 1 ? arrive(empty) : arrive_at_peer(empty, work.rank * work.share + lane);
    }
    before = stage;
    if (++stage == at.stages) stage = 0, parity ^= 1;
  }
  wait_for_products<0>();
}

template <int kTokens, int kStep>
__device__ __forceinline__ Work find_work(int k, int share, int split) {
  const int blocks = share * split, in_cluster = blockIdx.x % blocks, steps = (k + kStep - 1) / kStep;
  const int part = in_cluster % share, rank = in_cluster / share;
  return {static_cast<int>(blockIdx.x) / blocks * share + part,
          static_cast<int>(blockIdx.y) * kTokens,
          steps * rank / split,
          steps * (rank + 1) / split,
          part,
          share,
          rank,
          split};
}

template <typename T, int kGroups, int kTokens, bool kGated>
__global__ void __launch_bounds__(kGroups * 128 + kWarp)
    linear_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x, Linear<T> p) {
  using S = Shape<kGroups, kTokens>;
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t barriers[2 * kMaxStages + 1];
  const Work work = find_work<kTokens, S::kStep>(p.k, p.share, p.split);
  uint8_t* const aligned = shared + (-shared_address(shared) & 1023);
  const uint32_t full = shared_address(barriers);
  const Places at{shared_address(aligned), full, full + kMaxStages * 8, full + 2 * kMaxStages * 8, p.stages};
  const bool sends = S::kSends && work.split > 1;

  start_successor();
  if (threadIdx.x == S::kThreads) {
    prefetch_map(&weight);
    prefetch_map(&x);
    for (int i = 0; i < p.stages; ++i) {
      init_barrier(at.full + i * 8, 1);
      init_barrier(at.empty + i * 8, S::kThreads / kWarp * p.share);
    }
    init_barrier(at.sent, 1);
    publish_barriers();
    if (sends) arrive_expecting(at.sent, S::kSentBytes);
  }
  __syncthreads();
  if (work.share > 1 || sends) arrive_at_cluster();
  typename S::Sums sums = {};
  if (threadIdx.x >= S::kThreads) {
    ask_for_tiles<T, kGroups, kTokens, kGated>(&weight, &x, work, at, p, sends);
    __syncwarp();
  } else {
    if (work.share > 1 || sends) wait_for_cluster();
    multiply_tiles<T, kGroups, kTokens>(sums, work, at);
  }
  if constexpr (S::kSends) {
    if (sends) {
      const uint32_t received = at.tiles + p.stages * S::kStageBytes;
      if (threadIdx.x < S::kThreads) {
        send_sums<S, kGated>(sums, received, at.sent, work);
        wait_barrier(at.sent, 0);
        finish_sent<T, S, kGated>(p, reinterpret_cast<float*>(aligned + (received - at.tiles)), work);
      }
      if (work.share > 1) {
        arrive_at_cluster();
        wait_for_cluster();
      }
      return;
    }
  }
  __syncthreads();  // all products have read their tiles, whose place the sums take
  float* const kept = reinterpret_cast<float*>(aligned);
  if (threadIdx.x < S::kThreads) keep_sums<S>(kept, sums);
  work.split > 1 ? sync_cluster() : __syncthreads();
  if (threadIdx.x < S::kThreads) finish_kept<T, S, kGated>(p, kept, work);
  if (work.share > 1 || work.split > 1) {  // others read this block's sums, or arrive at its barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
}

}  // namespace lamina
