// out = x * weightᵀ for as many rows of x as the matrix units need to keep pace with memory: a persistent kernel.
//
// As in stream_linear.cuh a block takes kGroups * 64 rows of the weights, and their transposed product with all rows of
// x; one warp asks the TMA for tiles, each group of four warps multiplies 64 rows by WGMMA. Here as many blocks as the
// GPU holds take tile after tile, so that the next one's weights arrive while results are written. The `parts` of a
// cluster take different rows of the weights and hand each other the rows of x by multicast. What is left when most
// blocks have had as many tiles as others is shared out: by rows of x, where three strips go to two blocks, or the
// `ranks` of a cluster take a part of the columns each. Their sums travel through the same ring of stages as the tiles,
// and are added in the order of the ranks. Where kGated, the first half of the weights is a gate for the second: 8 rows
// of the one come before 8 of the other.
#pragma once

#include "hopper.cuh"
#include "pdl.cuh"
#include "resident_shape.cuh"
#include "resident_sums.cuh"
#include "warpgroup.cuh"

namespace lamina {

// The work of one warp.
template <typename S, bool kGated>
class ResidentProducer {
 public:
  __device__ __forceinline__ ResidentProducer(const CUtensorMap* weight, const CUtensorMap* x, const RingPlaces& at,
                                              int block, int copied)
      : weight_(weight), x_(x), at_(at), block_(block), copied_(copied), once_(read_once()), often_(read_often()) {}

  __device__ __forceinline__ void run(const Items<S>& items) {
    const bool asks = threadIdx.x % kWarp == 0;
    Item item;
    bool found = items.find(0, item);
    int early = found ? min(S::kStages, item.count) : 0;  // weights asked for before x is there
    for (int i = 0; asks && i < early; ++i) ask_weight(item, i, i);
    __syncwarp();
    wait_for_cluster();  // every block has its barriers
    if (!asks) return;
    wait_for_predecessor();
    for (int index = 1; found; found = items.find(index++, item)) {
      for (int step = 0; step < item.count; ++step, ring_.advance()) {
        if (early > 0) {
          --early;
        } else {
          wait_barrier(at_.empty + ring_.stage * 8, ring_.parity ^ 1);
          ask_weight(item, step, ring_.stage);
        }
        ask_x(item, step);
      }
      if constexpr (S::kRanks > 1)
        if (item.is_shared) take_sums(item.is_narrow);
    }
  }

 private:
  __device__ __forceinline__ uint32_t stage(int index) const { return at_.tiles + index * S::kStageBytes; }

  __device__ __forceinline__ void ask_weight(const Item& item, int step, int to) const {
    const uint32_t barrier = at_.full + to * 8;
    arrive_expecting(barrier, S::kWeightBytes + copied_ * S::kParts * kColumns * 2);
    const int column = (item.begin + step) * kColumns;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const int strip = group == 0 ? item.first : item.second + group - 1;
      copy_box(stage(to) + group * kTileBytes, weight_, column, kGated ? 0 : strip * kRows, 0,
               kGated ? strip * (kRows / 16) : 0, barrier, once_);
    }
  }

  // Every part of a cluster asks for some rows of x, for all parts of its rank.
  __device__ __forceinline__ void ask_x(const Item& item, int step) const {
    const uint32_t to = stage(ring_.stage) + S::kWeightBytes, barrier = at_.full + ring_.stage * 8;
    const int column = (item.begin + step) * kColumns;
    if constexpr (S::kParts == 1) {
      copy_box(to, x_, column, item.token, barrier, often_);
    } else {
      const int row = block_ % S::kParts * copied_, first = block_ - block_ % S::kParts;
      copy_box_to_peers(to + row * kColumns * 2, x_, column, item.token + row, barrier,
                        static_cast<uint16_t>(((1 << S::kParts) - 1) << first), often_);
    }
  }

  // Lets the others send. That this block has their last sums says that each has seen it take stages for them, so that
  // no barrier counts two items at once.
  __device__ __forceinline__ void take_sums(bool is_narrow) {
#pragma unroll
    for (int i = 0; i < S::kSumStages; ++i, ring_.advance()) {
      wait_barrier(at_.empty + ring_.stage * 8, ring_.parity ^ 1);
      arrive_expecting(at_.full + ring_.stage * 8, S::sum_bytes(i, is_narrow));
    }
    wait_barrier(at_.summed, sums_parity_ ^ 1);
    sums_parity_ ^= 1;
    for (int peer = block_ % S::kParts; peer < S::kCluster; peer += S::kParts)
      if (peer != block_) arrive_at_peer(at_.ready, peer);
  }

  const CUtensorMap *weight_, *x_;
  const RingPlaces& at_;
  const int block_, copied_;  // which of the cluster; rows of x
  const uint64_t once_, often_;
  RingPosition<S::kStages> ring_;
  uint32_t sums_parity_ = 0;
};

// The sums of an item, of 2 * kCount rows of x that begin at `row` of those in a stage.
template <typename T, typename S, int kCount>
__device__ __forceinline__ void multiply_item(float (&sums)[kCount], int row, int count, const RingPlaces& at,
                                              RingPosition<S::kStages>& ring) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so the compiler sees that it is uniform
  int before = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = 0.0f;
  for (int step = 0; step < count; ++step, ring.advance()) {
    wait_barrier(at.full + ring.stage * 8, ring.parity);
    const uint32_t tiles = at.tiles + ring.stage * S::kStageBytes;
    const uint64_t left = tile_descriptor(tiles + group * kTileBytes);
    const uint64_t right = tile_descriptor(tiles + S::kWeightBytes + row * kColumns * 2);
    begin_products();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) multiply<2 * kCount>(sums, left + 2 * k, right + 2 * k, T{});
    commit_products();
    wait_for_products<1>();
    if (step > 0) release_stage<S>(at, before);
    before = ring.stage;
  }
  wait_for_products<0>();
  pin(sums);
  release_stage<S>(at, before);
}

// The results of an item, of 2 * kCount rows of x that begin at `row` of its own.
template <typename T, typename S, bool kGated, int kCount>
__device__ __forceinline__ void finish_item(const ResidentRows<T, kGated>& rows, const Item& item, int row, int section,
                                            const RingPlaces& at, RingPosition<S::kStages>& ring,
                                            SumExchange<S>& exchange) {
  float sums[kCount];
  multiply_item<T, S>(sums, row, item.count, at, ring);
  if constexpr (S::kRanks > 1) {
    if (item.is_shared) {
      exchange.run(sums, ring);
      constexpr int kAdded = kCount / S::kRanks;
      return rows.template write<kAdded>(sums, item.token + row + exchange.rank() * 2 * kAdded, item.token + section);
    }
  }
  rows.template write<kCount>(sums, item.token + row, item.token + section);
}

// The work of the warps that multiply.
template <typename T, typename S, bool kGated>
__device__ __forceinline__ void finish_items(const Linear<T>& p, const Items<S>& items, const RingPlaces& at,
                                             int block) {
  const int group = threadIdx.x / 128, section = p.copied * S::kParts;
  RingPosition<S::kStages> ring;
  SumExchange<S> exchange(at, block);
  Item item;
  for (int index = 0; items.find(index, item); ++index) {
    const ResidentRows<T, kGated> rows(p, group == 0 ? item.first : item.second + group - 1);
    if constexpr (S::kNarrows) {
      if (item.is_narrow && group > 0) {
        finish_item<T, S, kGated, S::kSums / 2>(rows, item, item.half * S::kSums, section, at, ring, exchange);
        continue;
      }
    }
    finish_item<T, S, kGated, S::kSums>(rows, item, 0, section, at, ring, exchange);
  }
}

template <typename S>
__device__ __forceinline__ void init_ring(const RingPlaces& at) {
  for (int i = 0; i < S::kStages; ++i) {
    init_barrier(at.full + i * 8, 1);
    init_barrier(at.empty + i * 8, S::kThreads / kWarp * S::kParts);
  }
  if (S::kRanks > 1) init_barrier(at.ready, S::kRanks - 1);
  init_barrier(at.summed, S::kThreads / kWarp);
  publish_barriers();
}

template <typename T, typename S, bool kGated>
__global__ void __launch_bounds__(S::kAllThreads, 1)
    resident_linear_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                           Linear<T> p) {
  extern __shared__ uint8_t shared[];
  const uint32_t tiles = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t full = tiles + S::kStages * S::kStageBytes, empty = full + S::kStages * 8;
  const RingPlaces at{tiles, full, empty, empty + S::kStages * 8, empty + S::kStages * 8 + 8};
  const int block = static_cast<int>(blockIdx.x) % S::kCluster;
  const Items<S> items(p.n, p.k, p.tokens, p.copied * S::kParts);

  start_successor();
  if (threadIdx.x == S::kThreads) {
    prefetch_map(&weight);
    prefetch_map(&x);
    init_ring<S>(at);
  }
  __syncthreads();
  arrive_at_cluster();
  if (threadIdx.x >= S::kThreads) {
    if constexpr (S::kMovesRegisters) give_registers<S::kProducerRegisters>();
    if (threadIdx.x < S::kThreads + kWarp)
      ResidentProducer<S, kGated>(&weight, &x, at, block, p.copied).run(items);
    else
      wait_for_cluster();
  } else {
    if constexpr (S::kMovesRegisters) take_registers<S::kRowRegisters>();
    wait_for_cluster();
    finish_items<T, S, kGated>(p, items, at, block);
  }
  if constexpr (S::kParts > 1) {  // others still arrive at this block's barriers
    arrive_at_cluster();
    wait_for_cluster();
  }
}

}  // namespace lamina
