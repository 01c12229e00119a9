// A persistent kernel: warp-specialised GEMM, out = x * weightᵀ, for tall enough x that the tensor cores must keep pace
// with memory.
//
// As in split_k_gemm.cuh a block computes tiles of kWarpgroups * 64 weight rows, transposed, by all rows of x: one
// producer warp loads tiles by TMA, each consumer warpgroup multiplies 64 weight rows by WGMMA. Here the grid is as
// large as the GPU holds at once, and each block takes tile after tile, so that the next tile's weights arrive while
// the epilogue of this one runs. The kMulticast blocks of a cluster take different weight rows and share the rows of x
// by TMA multicast. The last wave, in which there are fewer tiles than blocks, is divided further: by rows of x, where
// two blocks take three strips, or by split-K over the kSplitK ranks of a cluster. Partial sums travel through the same
// pipeline stages as the tiles, and are added in the order of the ranks. Where kGated, the first half of the weights is
// the gate of the second: 8 rows of the one come before 8 of the other.
#pragma once

#include "hopper.cuh"
#include "pdl.cuh"
#include "persistent_epilogue.cuh"
#include "persistent_shape.cuh"
#include "scaled_gemm.cuh"
#include "warpgroup.cuh"

namespace lamina {

// The producer warp.
template <typename S, bool kGated>
class PersistentProducer {
 public:
  __device__ __forceinline__ PersistentProducer(const CUtensorMap* weight, const CUtensorMap* x,
                                                const PersistentLayout& at, int block, int box_rows, bool promises_x)
      : weight_(weight),
        x_(x),
        at_(at),
        block_(block),
        box_rows_(box_rows),
        promises_x_(promises_x),
        once_(evict_first()),
        often_(evict_last()) {}

  __device__ __forceinline__ void run(const PersistentTileScheduler<S>& scheduler) {
    const bool is_elected = threadIdx.x % kWarp == 0;
    PersistentTile work;
    bool found = scheduler.find(0, work);
    int early = found ? min(S::kStages, work.count) : 0;  // weight tiles loaded before x is there
    for (int i = 0; is_elected && i < early; ++i) load_weight(work, i, i);
    __syncwarp();
    wait_for_cluster();  // every block has its barriers
    if (!is_elected) return;
    wait_for_predecessor();
    if (promises_x_) start_successor();
    for (int index = 1; found; found = scheduler.find(index++, work)) {
      for (int step = 0; step < work.count; ++step, state_.advance()) {
        if (early > 0) {
          --early;
        } else {
          wait_barrier(at_.empty + state_.stage * 8, state_.parity ^ 1);
          load_weight(work, step, state_.stage);
        }
        load_x(work, step);
      }
      if constexpr (S::kSplitK > 1)
        if (work.is_shared) receive_partial_sums(work.is_narrow);
    }
  }

 private:
  __device__ __forceinline__ uint32_t stage(int index) const { return at_.tiles + index * S::kStageBytes; }

  __device__ __forceinline__ void load_weight(const PersistentTile& work, int step, int to) const {
    const uint32_t barrier = at_.full + to * 8;
    arrive_expecting(barrier, S::kWeightBytes + box_rows_ * S::kMulticast * kRowBytes);
    const int column = (work.begin + step) * kTileColumns<typename S::In>;
#pragma unroll
    for (int group = 0; group < S::kWarpgroups; ++group) {
      const int strip = group == 0 ? work.first : work.second + group - 1;
      tma_load(stage(to) + group * kTileBytes, weight_, column, kGated ? 0 : strip * kRows, 0,
               kGated ? strip * (kRows / 16) : 0, barrier, once_);
    }
  }

  // Each block of a multicast group loads some rows of x, for all blocks of the group.
  __device__ __forceinline__ void load_x(const PersistentTile& work, int step) const {
    const uint32_t to = stage(state_.stage) + S::kWeightBytes, barrier = at_.full + state_.stage * 8;
    const int column = (work.begin + step) * kTileColumns<typename S::In>;
    if constexpr (S::kMulticast == 1) {
      tma_load(to, x_, column, work.token, barrier, often_);
    } else {
      const int row = block_ % S::kMulticast * box_rows_, first = block_ - block_ % S::kMulticast;
      tma_load_multicast(to + row * kRowBytes, x_, column, work.token + row, barrier,
                         static_cast<uint16_t>(((1 << S::kMulticast) - 1) << first), often_);
    }
  }

  // Lets the other ranks send their partial sums. That this block has their last ones shows that each has seen it take
  // stages for them, so that no barrier counts two tiles at once.
  __device__ __forceinline__ void receive_partial_sums(bool is_narrow) {
#pragma unroll
    for (int i = 0; i < S::kSumStages; ++i, state_.advance()) {
      wait_barrier(at_.empty + state_.stage * 8, state_.parity ^ 1);
      arrive_expecting(at_.full + state_.stage * 8, S::sum_bytes(i, is_narrow));
    }
    wait_barrier(at_.summed, sums_parity_ ^ 1);
    sums_parity_ ^= 1;
    for (int peer = block_ % S::kMulticast; peer < S::kCluster; peer += S::kMulticast)
      if (peer != block_) arrive_at_peer(at_.ready, peer);
  }

  const CUtensorMap *weight_, *x_;
  const PersistentLayout& at_;
  const int block_, box_rows_;  // rank in the cluster; rows of x in a TMA box
  const bool promises_x_;
  const uint64_t once_, often_;
  PipelineState<S::kStages> state_;
  uint32_t sums_parity_ = 0;
};

// Accumulates a tile: 2 * kCount rows of x that begin at `row` of those in a stage.
template <typename S, typename Sum, int kCount>
__device__ __forceinline__ void mainloop(Sum (&sums)[kCount], int row, int count, const PersistentLayout& at,
                                         PipelineState<S::kStages>& state) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so the compiler sees that it is uniform
  int before = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = Sum{};
  for (int step = 0; step < count; ++step, state.advance()) {
    wait_barrier(at.full + state.stage * 8, state.parity);
    const uint32_t tiles = at.tiles + state.stage * S::kStageBytes;
    const uint64_t left = tile_descriptor(tiles + group * kTileBytes);
    const uint64_t right = tile_descriptor(tiles + S::kWeightBytes + row * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) wgmma<2 * kCount>(sums, left + 2 * k, right + 2 * k, typename S::In{});
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release_stage<S>(at, before);
    before = state.stage;
  }
  wgmma_wait<0>();
  pin(sums);
  release_stage<S>(at, before);
}

// The same in FP8, with the scales of the tile. Of more than 128 rows of x half are summed up at a time; registers have
// room for the sums of one half at a time beside those of 256.
template <typename S, int kCount>
__device__ __forceinline__ void scaled_mainloop(float (&sums)[kCount], int row, const PersistentTile& work,
                                                const LaneScales& scales, const PersistentLayout& at,
                                                PipelineState<S::kStages>& state, Float8 format) {
  constexpr int kParts = kCount > 64 ? 2 : 1, kSome = kCount / kParts;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  PipelineState<S::kStages> taken = state;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = 0.0f;
  const auto begin = [&](auto& part, int, auto parity) {
    constexpr int kPart = decltype(parity)::value * (kParts - 1);
    if (kPart == 0) wait_barrier(at.full + state.stage * 8, state.parity);
    const uint32_t tiles = at.tiles + state.stage * S::kStageBytes;
    const uint32_t x = tiles + S::kWeightBytes + (row + 2 * kPart * kSome) * kRowBytes;
    wgmma_fence();
    begin_tile<2 * kSome>(part, tiles + group * kTileBytes, x, format);
    if (kPart == kParts - 1) state.advance();
  };
  const auto finish = [&](auto& part, int index, auto parity) {
    constexpr int kPart = decltype(parity)::value * (kParts - 1), kFirst = kPart * kSome;
    if (kPart == kParts - 1) release_stage<S>(at, taken.stage), taken.advance();
    scales.add(sums + kFirst, part, work.token + row + 2 * kFirst, work.begin + index / kParts);
  };
  if constexpr (kCount + 2 * kSome <= 192)
    take_in_turns<float, kSome>(work.count * kParts, begin, finish);
  else
    take_one_by_one<float, kSome, kParts>(work.count * kParts, begin, finish);
  scales.finish(sums, work.token + row);
}

// The same of whole numbers.
template <typename S, int kCount>
__device__ __forceinline__ void scaled_mainloop(float (&sums)[kCount], int row, const PersistentTile& work,
                                                const LaneScales& scales, const PersistentLayout& at,
                                                PipelineState<S::kStages>& state, Int8) {
  int totals[kCount];
  mainloop<S>(totals, row, work.count, at, state);
  scale_totals(sums, totals, scales, work.token + row);
}

// Mainloop, reduction over the cluster and epilogue of a tile: 2 * kCount rows of x that begin at `row` of its own.
template <typename S, int kCount, typename Epilogue>
__device__ __forceinline__ void consume_tile(const Epilogue& rows, const PersistentTile& work, int row, int section,
                                             const PersistentLayout& at, PipelineState<S::kStages>& state,
                                             ClusterReduction<S>& exchange) {
  float sums[kCount];
  if constexpr (kIsScaled<typename S::In>)
    scaled_mainloop<S>(sums, row, work, rows.scales(), at, state, typename S::In{});
  else
    mainloop<S>(sums, row, work.count, at, state);
  if constexpr (S::kSplitK > 1) {
    if (work.is_shared) {
      exchange.run(sums, state);
      constexpr int kAdded = kCount / S::kSplitK;
      return rows.template write<kAdded>(sums, work.token + row + exchange.rank() * 2 * kAdded, work.token + section);
    }
  }
  rows.template write<kCount>(sums, work.token + row, work.token + section);
}

// The consumer warpgroups.
template <typename S, bool kGated, typename In, typename Out>
__device__ __forceinline__ void consume_tiles(const Linear<In, Out>& p, const PersistentTileScheduler<S>& scheduler,
                                              const PersistentLayout& at, int block) {
  const int group = threadIdx.x / 128, section = p.box_rows * S::kMulticast;
  PipelineState<S::kStages> state;
  ClusterReduction<S> exchange(at, block);
  PersistentTile work;
  for (int index = 0; scheduler.find(index, work); ++index) {
    const PersistentEpilogue<In, Out, kGated> rows(p, group == 0 ? work.first : work.second + group - 1);
    if constexpr (S::kNarrows) {
      if (work.is_narrow && group > 0) {
        consume_tile<S, S::kSums / 2>(rows, work, work.half * S::kSums, section, at, state, exchange);
        continue;
      }
    }
    consume_tile<S, S::kSums>(rows, work, 0, section, at, state, exchange);
  }
}

template <typename S>
__device__ __forceinline__ void init_pipeline(const PersistentLayout& at) {
  for (int i = 0; i < S::kStages; ++i) {
    init_barrier(at.full + i * 8, 1);
    init_barrier(at.empty + i * 8, S::kThreads / kWarp * S::kMulticast);
  }
  if (S::kSplitK > 1) init_barrier(at.ready, S::kSplitK - 1);
  init_barrier(at.summed, S::kThreads / kWarp);
  publish_barriers();
}

template <typename S, bool kGated, typename In, typename Out>
__global__ void __launch_bounds__(S::kAllThreads, 1)
    persistent_gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                           Linear<In, Out> p) {
  extern __shared__ uint8_t shared[];
  const uint32_t tiles = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t full = tiles + S::kStages * S::kStageBytes, empty = full + S::kStages * 8;
  const PersistentLayout at{tiles, full, empty, empty + S::kStages * 8, empty + S::kStages * 8 + 8};
  const int block = static_cast<int>(blockIdx.x) % S::kCluster;
  const PersistentTileScheduler<S> scheduler(p.n, p.k, p.tokens, p.box_rows * S::kMulticast, p.splits_all);

  if (!p.promises_x) start_successor();
  if (threadIdx.x == S::kThreads) {
    prefetch_tensor_map(&weight);
    prefetch_tensor_map(&x);
    init_pipeline<S>(at);
  }
  __syncthreads();
  arrive_at_cluster();
  if (threadIdx.x >= S::kThreads) {
    if constexpr (S::kMovesRegisters) deallocate_registers<S::kProducerRegisters>();
    if (threadIdx.x < S::kThreads + kWarp)
      PersistentProducer<S, kGated>(&weight, &x, at, block, p.box_rows, p.promises_x).run(scheduler);
    else
      wait_for_cluster();
  } else {
    if constexpr (S::kMovesRegisters) allocate_registers<S::kRowRegisters>();
    wait_for_cluster();
    if constexpr (kIsScaled<In>) wait_for_predecessor();  // the scales of x are read by these threads
    consume_tiles<S, kGated>(p, scheduler, at, block);
  }
  if constexpr (S::kMulticast > 1) {  // others still arrive at this block's barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
}

}  // namespace lamina
