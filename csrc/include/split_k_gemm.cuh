// Warp-specialised split-K GEMM, out = x * weightᵀ, for few rows of x: the weights stream through shared memory once,
// at the rate of device memory.
//
// A block takes kWarpgroups * 64 weight rows and computes, transposed, their product with kTokens rows of x. One
// producer warp loads tiles by TMA, each consumer warpgroup multiplies its 64 rows by WGMMA. Of a cluster, `multicast`
// blocks with neighbouring weight rows share the tiles of x by TMA multicast; `split_k` times as many divide the
// columns of K, and their partial sums are added in the order of the ranks. Weights are loaded before the kernel that
// makes x has ended (programmatic dependent launch). Where kGated, the first half of the weights is the gate of the
// second.
#pragma once

#include "hopper.cuh"
#include "pdl.cuh"
#include "scaled_gemm.cuh"
#include "split_k_epilogue.cuh"
#include "split_k_shape.cuh"

namespace lamina {

// The first of the 64 weight rows of a warpgroup: where gated, half of a block's warpgroups take rows of the gate.
template <int kWarpgroups, bool kGated>
__device__ __forceinline__ int first_row(const SplitKTile& work, int group, int n) {
  static_assert(!kGated || kWarpgroups % 2 == 0, "gate and up take as many warpgroups");
  if (!kGated) return (work.tile * kWarpgroups + group) * kRows;
  constexpr int kHalf = (kWarpgroups + 1) / 2;
  return (work.tile * kHalf + group % kHalf) * kRows + (group < kHalf ? 0 : n / 2);
}

// The tiles of x of a step, one after another at an offset in every block that shares them.
template <typename S>
__device__ __forceinline__ void load_x_tiles(const CUtensorMap* x, const SplitKTile& work, int step, uint32_t to,
                                             uint32_t barrier, int box_rows, uint64_t policy) {
#pragma unroll
  for (int i = 0; i < S::kTiles; ++i, to += S::kXBytes) {
    const int column = step * S::kStep + i * (S::kStep / S::kTiles);
    if (work.multicast == 1) {
      tma_load(to, x, column, work.token, barrier, policy);
      continue;
    }
    const int row = work.multicast_rank * box_rows;
    const auto peers = static_cast<uint16_t>(((1 << work.multicast) - 1) << (work.rank * work.multicast));
    tma_load_multicast(to + row * kRowBytes, x, column, work.token + row, barrier, peers, policy);
  }
}

// A block's share of a matrix of so many bytes, a multiple of 16.
__device__ __forceinline__ void prefetch_share(const uint8_t* from, int64_t bytes) {
  const int64_t blocks = int64_t{gridDim.x} * gridDim.y, index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t each = (bytes / 16 + blocks - 1) / blocks * 16, first = index * each;
  if (first < bytes) bulk_prefetch_to_l2(from + first, static_cast<uint32_t>(min(each, bytes - first)));
}

// By one warp, which has nothing to multiply yet: adapters of up to 32 tokens come to the L2 cache, so that the kernel
// behind, which begins no earlier than x is complete, finds them there. No kernel of a CUDA graph writes them.
__device__ __forceinline__ void prefetch_adapters(const AdaptersBehind& behind, int tokens) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const int slot = lane < tokens ? behind.slots[lane] : -1;
  const unsigned same = __match_any_sync(kAllLanes, slot);
  if (slot < 0 || (same & ((1u << lane) - 1)) != 0) return;
  prefetch_share(behind.a + slot * behind.a_bytes, behind.a_bytes);
  prefetch_share(behind.b + slot * behind.b_bytes, behind.b_bytes);
}

constexpr uint32_t kPacedClocks = 8192;  // about as long as attention of few tokens takes

// Before the load of a step that is one of the first `stages`: waits, so that these are spread over so many clocks
// since `begin`, and the kernel ahead does not find all of memory busy with them. No longer than until the block has
// read its first stage, whose barrier is the first of `empty`: from then on nothing is ahead.
__device__ __forceinline__ void pace_loads(int step, const SplitKTile& work, uint32_t empty, int stages, uint32_t begin,
                                           uint32_t over = kPacedClocks) {
  const int number = step - work.begin;
  if (number >= stages) return;
  const uint32_t due = over / static_cast<uint32_t>(stages) * static_cast<uint32_t>(number);
  while (clocks() - begin < due && !has_ended(empty, 0)) {
  }
}

// The producer warp: load_weight(step, stage) as stages get free, and behind it load_x(step, stage), as soon as the
// kernel that makes x has ended. Where promises_x the next kernel begins behind that.
template <typename LoadWeight, typename LoadX>
__device__ __forceinline__ void produce_stages(const SplitKTile& work, uint32_t empty, int stages, bool sends,
                                               const LoadWeight& load_weight, const LoadX& load_x,
                                               bool promises_x = false) {
  const bool is_elected = threadIdx.x % kWarp == 0;
  const int first = min(stages, work.end - work.begin);
  for (int i = 0; is_elected && i < first; ++i) load_weight(work.begin + i, i);
  __syncwarp();
  if (work.multicast > 1 || sends) wait_for_cluster();  // every block has its barriers
  if (!is_elected) return;
  wait_for_predecessor();
  for (int i = 0; i < first; ++i) load_x(work.begin + i, i);
  if (promises_x) start_successor();
  int stage = 0, parity = 0;
  for (int step = work.begin + first; step < work.end; ++step) {
    wait_barrier(empty + stage * 8, parity);
    load_weight(step, stage);
    load_x(step, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

template <typename S, int kWarpgroups, bool kGated, typename In, typename Out>
__device__ __forceinline__ void produce_tiles(const CUtensorMap* weight, const CUtensorMap* x, const SplitKTile& work,
                                              const SharedLayout& at, const Linear<In, Out>& p, bool sends) {
  const uint64_t once = evict_first(), often = evict_last();
  const uint32_t begin = clocks();
  const int stage_bytes = S::kTiles * (kWarpgroups * kTileBytes + p.box_rows * work.multicast * kRowBytes);
  const auto load_weight = [&](int step, int stage) {
    const uint32_t to = at.tiles + stage * S::kStageBytes, barrier = at.full + stage * 8;
    if (p.pace > 0) pace_loads(step, work, at.empty, at.stages, begin, p.pace * kPaceClocks);
    arrive_expecting(barrier, stage_bytes);
#pragma unroll
    for (int i = 0; i < S::kTiles * kWarpgroups; ++i) {
      const int column = step * S::kStep + i / kWarpgroups * kTileColumns<In>,
                row = first_row<kWarpgroups, kGated>(work, i % kWarpgroups, p.n);
      tma_load(to + i * kTileBytes, weight, column, row, barrier, once);
    }
  };
  const auto load_x = [&](int step, int stage) {
    load_x_tiles<S>(x, work, step, at.tiles + stage * S::kStageBytes + S::kTiles * kWarpgroups * kTileBytes,
                    at.full + stage * 8, p.box_rows, often);
  };
  produce_stages(work, at.empty, at.stages, sends, load_weight, load_x, p.promises_x);
}

// Whoever writes into a stage must know that this warp has read it; `empty` is the stage's barrier.
__device__ __forceinline__ void release_stage(const SplitKTile& work, uint32_t empty, int lane) {
  if (lane >= work.multicast) return;
  work.multicast == 1 ? arrive(empty) : arrive_at_peer(empty, work.rank * work.multicast + lane);
}

template <typename S, int kWarpgroups, typename Sum>
__device__ __forceinline__ void mainloop(Sum (&sums)[S::kTokenRows / 2], const SplitKTile& work,
                                         const SharedLayout& at) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so the compiler sees that it is uniform
  const int lane = threadIdx.x % kWarp, steps = work.end - work.begin;
  int stage = 0, parity = 0, before = 0;
  for (int step = 0; step < steps; ++step) {
    wait_barrier(at.full + stage * 8, parity);
    const uint32_t tiles = at.tiles + stage * S::kStageBytes + group * kTileBytes;
    const uint32_t x = at.tiles + stage * S::kStageBytes + S::kTiles * kWarpgroups * kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      const uint64_t left = tile_descriptor(tiles + i * kWarpgroups * kTileBytes);
      const uint64_t right = tile_descriptor(x + i * S::kXBytes);
#pragma unroll
      for (int k = 0; k < kRowBytes / 32; ++k)
        wgmma<S::kTokenRows>(sums, left + 2 * k, right + 2 * k, typename S::In{});
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release_stage(work, at.empty + before * 8, lane);
    before = stage;
    if (++stage == at.stages) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
}

// The same in FP8.
template <typename S, int kWarpgroups, bool kGated, typename Out>
__device__ __forceinline__ void scaled_mainloop(typename S::Sums& sums, const SplitKTile& work, const SharedLayout& at,
                                                const Linear<Float8, Out>& p) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x % kWarp;
  const LaneScales scales(p, first_row<kWarpgroups, kGated>(work, group, p.n));
  wait_for_predecessor();  // the scales of x are read by these threads
  int stage = 0, parity = 0, taken = 0;
  const auto begin = [&](auto& part, int, auto is_odd) {
    constexpr int kTile = decltype(is_odd)::value * (S::kTiles - 1);
    if (kTile == 0) wait_barrier(at.full + stage * 8, parity);
    const uint32_t tiles = at.tiles + stage * S::kStageBytes + (kTile * kWarpgroups + group) * kTileBytes;
    const uint32_t x = at.tiles + stage * S::kStageBytes + S::kTiles * kWarpgroups * kTileBytes + kTile * S::kXBytes;
    wgmma_fence();
    begin_tile<S::kTokenRows>(part, tiles, x, Float8{});
    if (kTile == S::kTiles - 1 && ++stage == at.stages) stage = 0, parity ^= 1;
  };
  const auto finish = [&](auto& part, int index, auto is_odd) {
    if (decltype(is_odd)::value * (S::kTiles - 1) == S::kTiles - 1) {
      release_stage(work, at.empty + taken * 8, lane);
      if (++taken == at.stages) taken = 0;
    }
    scales.add(sums, part, work.token, work.begin * S::kTiles + index);
  };
  constexpr int kCount = S::kTokenRows / 2;
  const int tiles = (work.end - work.begin) * S::kTiles;
  if constexpr (S::kTiles == 2)
    take_in_pairs<float, kCount>(tiles, begin, finish);
  else if constexpr (kWarpgroups * S::kTokenRows <= 128)
    take_in_turns<float, kCount>(tiles, begin, finish);
  else  // registers have no room for two
    take_one_by_one<float, kCount, 1>(tiles, begin, finish);
  scales.finish(sums, work.token);
}

// The same of whole numbers.
template <typename S, int kWarpgroups, bool kGated, typename Out>
__device__ __forceinline__ void scaled_mainloop(typename S::Sums& sums, const SplitKTile& work, const SharedLayout& at,
                                                const Linear<Int8, Out>& p) {
  const LaneScales scales(p, first_row<kWarpgroups, kGated>(work, threadIdx.x / 128, p.n));
  int totals[S::kTokenRows / 2] = {};
  mainloop<S, kWarpgroups>(totals, work, at);
  wait_for_predecessor();  // the scales of x are read by these threads
  scale_totals(sums, totals, scales, work.token);
}

template <int kTokens, int kStep>
__device__ __forceinline__ SplitKTile find_work(int k, int multicast, int split_k) {
  const int blocks = multicast * split_k, in_cluster = blockIdx.x % blocks, steps = (k + kStep - 1) / kStep;
  const int multicast_rank = in_cluster % multicast, rank = in_cluster / multicast;
  return {static_cast<int>(blockIdx.x) / blocks * multicast + multicast_rank,
          static_cast<int>(blockIdx.y) * kTokens,
          steps * rank / split_k,
          steps * (rank + 1) / split_k,
          multicast_rank,
          multicast,
          rank,
          split_k};
}

template <typename In, typename Out, int kWarpgroups, int kTokens, bool kGated>
__global__ void __launch_bounds__(kWarpgroups * 128 + kWarp)
    split_k_gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                        Linear<In, Out> p) {
  using S = SplitKShape<In, kWarpgroups, kTokens>;
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t barriers[2 * kMaxStages + 1];
  const SplitKTile work = find_work<kTokens, S::kStep>(p.k, p.multicast, p.split_k);
  const uint32_t begin = shared_address(shared), full = shared_address(barriers);
  const SharedLayout at{begin + (-begin & 1023), full, full + kMaxStages * 8, full + 2 * kMaxStages * 8, p.stages};
  const bool sends = S::kSends && work.split_k > 1;

  if (!p.promises_x) start_successor();
  if (threadIdx.x == S::kThreads) {
    prefetch_tensor_map(&weight);
    prefetch_tensor_map(&x);
    for (int i = 0; i < p.stages; ++i) {
      init_barrier(at.full + i * 8, 1);
      init_barrier(at.empty + i * 8, S::kThreads / kWarp * p.multicast);
    }
    init_barrier(at.sent, 1);
    publish_barriers();
    if (sends) arrive_expecting(at.sent, S::kSentBytes);
  }
  __syncthreads();
  if (work.multicast > 1 || sends) arrive_at_cluster();
  typename S::Sums sums = {};
  if (threadIdx.x >= S::kThreads) {
    produce_tiles<S, kWarpgroups, kGated>(&weight, &x, work, at, p, sends);
    __syncwarp();
  } else {
    if (work.multicast > 1 || sends) wait_for_cluster();
    if (p.behind.slots != nullptr && threadIdx.x < kWarp) prefetch_adapters(p.behind, p.tokens);
    if constexpr (kIsScaled<In>)
      scaled_mainloop<S, kWarpgroups, kGated>(sums, work, at, p);
    else
      mainloop<S, kWarpgroups>(sums, work, at);
  }
  if constexpr (S::kSends) {
    if (sends) {
      const uint32_t received = at.tiles + p.stages * S::kStageBytes;
      if (threadIdx.x < S::kThreads) {
        send_sums<S, kGated>(sums, received, at.sent, work);
        wait_barrier(at.sent, 0);
        finish_sent<S, kGated>(p, shared_floats(received), work);
      }
      if (work.multicast > 1) {
        arrive_at_cluster();
        wait_for_cluster();
      }
      return;
    }
  }
  __syncthreads();  // every WGMMA has read its tiles, whose memory the sums take
  float* const kept = shared_floats(at.tiles);
  if (threadIdx.x < S::kThreads) keep_sums<S>(kept, sums);
  work.split_k > 1 ? sync_cluster() : __syncthreads();
  if (threadIdx.x < S::kThreads) finish_kept<S, kGated>(p, kept, work);
  if (work.multicast > 1 || work.split_k > 1) {  // others read this block's sums, or arrive at its barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
}

}  // namespace lamina
