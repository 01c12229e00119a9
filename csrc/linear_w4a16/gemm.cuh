// Split-K GEMM of weights of four or eight bits for few rows of x, out = x * wᵀ: weights stream through shared memory
// at the rate of device memory and are dequantized in registers, from which WGMMA takes them.
//
// Blocks, clusters, PDL and epilogue are those of split_k_gemm.cuh. What differs: a stage has the same columns of
// kWarpgroups tiles as linear pieces of shuffled memory, and of their scales; each lane reads its own 16 bytes of a
// tile, or 32, makes 16 registers of them and begins four WGMMAs, while those of the tile before may still run.
#pragma once

#include "cuda_mma.cuh"
#include "lane_weights.cuh"
#include "shape.cuh"
#include "split_k_gemm.cuh"
#include "warpgroup.cuh"

namespace lamina {

// The producer warp.
template <typename S, bool kGated, typename T>
__device__ __forceinline__ void produce_nibbles(const CUtensorMap* x, const SplitKTile& work, const NibbleLayout& at,
                                                const LinearW4A16<T>& p, bool sends) {
  constexpr int kWarpgroups = S::kBlockRows / kRows;
  const uint64_t once = evict_first(), often = evict_last();
  const int k_tiles = p.k / kNibbleColumns, parts = p.zero == nullptr ? 1 : 2;
  const uint32_t begin = clocks();
  const auto load_weight = [&](int step, int stage) {
    if (p.paces) pace_loads(step, work, at.empty, at.stages, begin);
    const int tile = step * S::kTiles, tiles = min(S::kTiles, k_tiles - tile);
    const int group = find_group<S>(tile * kNibbleColumns, p),
              last = find_group<S>((tile + tiles) * kNibbleColumns - 1, p);
    const int scale_bytes = (last - group + 1) * kGroupElements * 2;
    const uint32_t barrier = at.full + stage * 8;
    arrive_expecting(barrier, kWarpgroups * (tiles * S::kWeightBytes + parts * scale_bytes) +
                                  S::kTiles * p.box_rows * work.multicast * kNibbleColumns * 2);
    uint32_t to = at.tiles + stage * S::kStageBytes,
             scales_to = at.scales + stage * kWarpgroups * parts * at.scale_bytes;
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i, to += S::kTiles * S::kWeightBytes) {
      // beyond the last tile the last one again, of which nothing is stored
      const int64_t row = min(first_row<kWarpgroups, kGated>(work, i, p.n), p.n - kRows) / kRows;
      bulk_load(to, p.weight + (row * k_tiles + tile) * S::kWeightBytes, tiles * S::kWeightBytes, barrier, once);
      const int64_t scales = (row * p.groups + group) * kGroupElements;
      bulk_load(scales_to, p.scale + scales, scale_bytes, barrier, once);
      scales_to += at.scale_bytes;
      if (p.zero == nullptr) continue;
      bulk_load(scales_to, p.zero + scales, scale_bytes, barrier, once);
      scales_to += at.scale_bytes;
    }
  };
  const auto load_x = [&](int step, int stage) {  // beyond the last column zeros
    load_x_tiles<S>(x, work, step, at.tiles + stage * S::kStageBytes + S::kTiles * kWarpgroups * S::kWeightBytes,
                    at.full + stage * 8, p.box_rows, often);
  };
  produce_stages(work, at.empty, at.stages, sends, load_weight, load_x);
}

// As release_stage, where it is wanted: by instructions that some lanes leave out, in place of branches.
__device__ __forceinline__ void release_by_warp(const SplitKTile& work, bool is_wanted, uint32_t empty, int lane) {
  const bool is_alone = work.multicast == 1;
  if (is_wanted && is_alone && lane == 0) arrive(empty);
  if (is_wanted && !is_alone && lane < work.multicast) arrive_at_peer(empty, work.rank * work.multicast + lane);
}

// The loop of a consumer warp: take(step, stage, load_ahead) multiplies what lies in a stage, and calls load_ahead()
// once all of its weights are in registers, which loads those of the next step. If they are not there yet, what that
// loads is of no use, as it is behind the last step: then let_go() releases all that was read, so that memory has it
// while the warp waits, and they are loaded anew. Where registers have no room for that, each step loads its own.
template <typename S, typename T, typename Take, typename LetGo>
__device__ __forceinline__ void consume_stages(LaneWeights<S, T>& weights, const SplitKTile& work,
                                               const NibbleLayout& at, const Take& take, const LetGo& let_go) {
  if (work.begin == work.end) return;
  int stage = 0, parity = 0;
  if constexpr (!S::kLoadsAhead) {
    for (int step = work.begin; step < work.end; ++step) {
      wait_barrier(at.full + stage * 8, parity);
      weights.load(step, stage);
      take(step, stage, [] {});
      if (++stage == at.stages) stage = 0, parity ^= 1;
    }
    return;
  }
  wait_barrier(at.full, 0);
  weights.load(work.begin, 0);
  for (int step = work.begin; step < work.end; ++step) {
    const int from = stage;
    if (++stage == at.stages) stage = 0, parity ^= 1;
    const bool is_there = step + 1 == work.end || has_ended(at.full + stage * 8, parity);
    const bool is_next_there = __ballot_sync(0xffffffffu, is_there) == 0xffffffffu;  // one answer for a warp
    take(step, from, [&] { weights.load(step + 1, stage); });
    if (is_next_there) continue;
    let_go();
    wait_barrier(at.full + stage * 8, parity);
    weights.load(step + 1, stage);
  }
}

template <typename S, typename T>
__device__ __forceinline__ void multiply_nibbles(typename S::Sums& sums, const SplitKTile& work, const NibbleLayout& at,
                                                 const LinearW4A16<T>& p) {
  constexpr int kWarpgroups = S::kBlockRows / kRows;
  LaneWeights<S, T> weights(at, p);
  uint32_t fragments[2][16];
  int held = -1;  // a stage that was not released
  const auto release = [&] {
    release_by_warp(work, held >= 0, at.empty + held * 8, weights.parts.lane);
    held = -1;
  };
  const auto take = [&](int step, int stage, const auto& load_ahead) {
    const uint64_t right =
        tile_descriptor(at.tiles + stage * S::kStageBytes + S::kTiles * kWarpgroups * S::kWeightBytes);
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      uint32_t (&left)[16] = fragments[i % 2];
      weights.dequantize_tile(left, i, step, stage);
      pin(left);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_from_registers<S::kTokenRows>(sums, left + 4 * k, right + (i * S::kXBytes / 16 + 2 * k), T{});
      wgmma_commit();
      if (i == S::kTiles - 1) load_ahead();
      wgmma_wait<1>();
      pin(fragments[(i + 1) % 2]);  // which may be written again from here on
      if (i == 0) release();
    }
    held = stage;
  };
  consume_stages(weights, work, at, take, [&] {
    wgmma_wait<0>();
    release();
  });
  wgmma_wait<0>();
  pin(sums);  // or the compiler would multiply them ahead of that wait
  complete<S, T>(sums);
}

// All columns of a lane's row of a tile of x, for eight rows at a time.
template <typename S>
__device__ __forceinline__ void load_x(uint32_t (&right)[S::kTokenRows / 8][2][4], const LaneParts& parts, int offset) {
#pragma unroll
  for (int t = 0; t < S::kTokenRows / 8; ++t) {
    load_matrices(right[t][0], parts.x[0] + offset + t * 8 * kRowBytes);
    load_matrices(right[t][1], parts.x[1] + offset + t * 8 * kRowBytes);
  }
}

// The products of a tile with x, in two short chains, of even and odd steps of 16 columns.
template <typename S, typename T>
__device__ __forceinline__ void multiply_tile(typename S::Sums& even, typename S::Sums& odd, const uint32_t (&left)[16],
                                              const uint32_t (&right)[S::kTokenRows / 8][2][4]) {
  const auto& of_step = reinterpret_cast<const uint32_t (&)[4][4]>(left);
#pragma unroll
  for (int t = 0; t < S::kTokenRows / 8; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t (&from)[4] = right[t][half];
      multiply_add(reinterpret_cast<float (&)[4]>(even[t * 4]), of_step[half * 2], {from[0], from[1]}, T{});
      multiply_add(reinterpret_cast<float (&)[4]>(odd[t * 4]), of_step[half * 2 + 1], {from[2], from[3]}, T{});
    }
  }
}

// The same by mma.sync: the chain of a tile is four short instructions, of which two run at once.
template <typename S, typename T>
__device__ __forceinline__ void multiply_by_warps(typename S::Sums& sums, const SplitKTile& work,
                                                  const NibbleLayout& at, const LinearW4A16<T>& p) {
  constexpr bool kHasRoom = S::kTokenRows <= 16;  // beside x, for weights to be loaded
  LaneWeights<S, T> weights(at, p);
  typename S::Sums odd = {};
  const auto take = [&](int step, int stage, const auto& load_ahead) {
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      uint32_t left[16], right[S::kTokenRows / 8][2][4];
      weights.dequantize_tile(left, i, step, stage);
      load_x<S>(right, weights.parts, stage * S::kStageBytes + i * S::kXBytes);
      if (kHasRoom && i == S::kTiles - 1) load_ahead();
      multiply_tile<S, T>(sums, odd, left, right);
      if (!kHasRoom && i == S::kTiles - 1) load_ahead();
    }
    __syncwarp();  // every lane has read the stage
    release_by_warp(work, true, at.empty + stage * 8, weights.parts.lane);
  };
  consume_stages(weights, work, at, take, [] {});
#pragma unroll
  for (int i = 0; i < S::kTokenRows / 2; ++i) sums[i] += odd[i];
  complete<S, T>(sums);
}

// A cluster's sums added up, and the results stored.
template <typename S, bool kGated, typename T>
__device__ __forceinline__ void finish_nibbles(typename S::Sums& sums, const SplitKTile& work, const NibbleLayout& at,
                                               const LinearW4A16<T>& p, bool sends) {
  const bool is_consumer = threadIdx.x < S::kThreads;
  if constexpr (S::kSends) {
    if (sends) {
      if (is_consumer) {
        send_sums<S, kGated>(sums, at.received, at.sent, work);
        wait_barrier(at.sent, 0);
        finish_sent<S, kGated>(p, shared_floats(at.received), work);
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
  if (is_consumer) keep_sums<S>(kept, sums);
  work.split_k > 1 ? sync_cluster() : __syncthreads();
  if (is_consumer) finish_kept<S, kGated>(p, kept, work);
  if (work.multicast > 1 || work.split_k > 1) {  // others read this block's sums, or arrive at its barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
}

template <typename S, bool kGated, typename T>
__global__ void __launch_bounds__(S::kThreads + kWarp, S::kByWarps ? S::kResident : 0)
    nibble_gemm_kernel(const __grid_constant__ CUtensorMap x, LinearW4A16<T> p) {
  extern __shared__ uint8_t shared[];
  const SplitKTile work = find_work<S::kTokenRows, S::kStep>(p.k, p.multicast, p.split_k);
  const uint32_t begin = shared_address(shared);
  const NibbleLayout at = find_layout<S>(begin + (-begin & 1023), p);
  const bool sends = S::kSends && work.split_k > 1;

  start_successor();
  if (threadIdx.x == S::kThreads) {
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
    produce_nibbles<S, kGated>(&x, work, at, p, sends);
    __syncwarp();
  } else {
    if (work.multicast > 1 || sends) wait_for_cluster();
    if constexpr (S::kByWarps)
      multiply_by_warps<S>(sums, work, at, p);
    else
      multiply_nibbles<S>(sums, work, at, p);
  }
  finish_nibbles<S, kGated>(sums, work, at, p, sends);
}

}  // namespace lamina
