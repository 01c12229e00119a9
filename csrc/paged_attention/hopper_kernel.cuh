// Prefill on Hopper: a persistent, warp-specialised kernel in the manner of FlashAttention 3, by WGMMA and TMA.
//
// One block a multiprocessor takes tiles of query rows from an atomic counter (dynamic tile scheduler), those with the
// most keys first. Its last warpgroup is the producer and loads queries, keys and values; each consumer warpgroup has
// 64 rows of the tile. Keys are visited from the last tile to the first, so that only the first ones need a mask. Q @
// Kᵀ of a tile is computed together with P @ V of the tile before, whose probabilities are in registers; then the
// softmax of one warpgroup overlaps the WGMMAs of the next (ping-pong scheduling): they take turns.
#pragma once

#include "hopper_converter.cuh"
#include "hopper_decode.cuh"
#include "hopper_producer.cuh"
#include "hopper_softmax.cuh"
#include "pdl.cuh"

namespace lamina {

// A consumer warpgroup: 64 rows of each tile.
template <typename S>
class HopperConsumer {
  using Math = typename S::Math;
  using Work = typename S::Work;

 public:
  __device__ __forceinline__ HopperConsumer(const typename S::Parameters& a, HopperShared<S>& shared)
      : a_(a.call),
        shared_(shared),
        fixed_(a.fixed),
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0)),
        new_rows_(a.call, shared),
        rows_(a.call, warpgroup_) {
    if (warpgroup_ == S::kWarpgroups - 1) pass_turn();
  }

  __device__ __forceinline__ void run() {
    for (;; queries_.advance()) {
      wait_barrier(shared_address(&shared_.query_full[queries_.stage]), queries_.parity);
      const Work work = shared_.work[queries_.stage];
      if (work.rows == 0) return;
      attend(work);
      finish(work);
    }
  }

 private:
  __device__ __forceinline__ void attend(const Work& work) {
    rows_.begin(work);
    take_queries(work);
    if constexpr (S::kFixedSplits) {
      attend_splits(work);
      if constexpr (!S::kQueryInRegisters) release_queries();
    } else {
      attend_keys(work, work.begin, work.end);
    }
  }

  __device__ __forceinline__ void take_queries([[maybe_unused]] const Work& work) {
    if constexpr (S::kDecodes) {
      wait_for_predecessor();
      rows_.load_queries(a_, work);
      if constexpr (S::kRotates) {
        const int first = work.start * (S::kDim / 2);
        rows_.rotate_queries(a_.cos + first, a_.sin + first);
        new_rows_.find(work);
      }
      release_queries();
    } else if constexpr (S::kQueryInRegisters) {
      rows_.load_queries(shared_.query[0]);
      release_queries();
    }
    if constexpr (S::kConverts) rows_.scale_queries(a_.scale);
  }

  // Each fixed split of the work's keys by itself, from the last to the first, and merged into those behind it.
  __device__ __forceinline__ void attend_splits(const Work& work) {
    const bool has_rows = !S::kDecodes || static_cast<int>(threadIdx.x) / 32 * 16 < work.rows;
    const int64_t slots = static_cast<int64_t>(fixed_.num_slots) * fixed_.partial_rows * (S::kDim + 2);
    float4* aside = reinterpret_cast<float4*>(a_.partials + slots) +
                    static_cast<int64_t>(blockIdx.x) * (S::kDim / 8 + 1) * S::kRowThreads + threadIdx.x;
#pragma unroll 1
    for (int end = work.end;;) {
      const int begin = max(work.begin, (end - 1) / fixed_.keys * fixed_.keys);
      attend_keys(work, begin, end);
      rows_.end_split();
      if (has_rows && end != work.end) rows_.merge_into(aside);
      if (begin == work.begin) return;
      if (has_rows) rows_.set_aside(aside);
      rows_.clear();
      end = begin;
    }
  }

  // Some keys of the work, from the last tile to the first.
  __device__ __forceinline__ void attend_keys(const Work& work, int begin, int end) {
    const int first = begin / S::kKeys;
    int tile = (end - 1) / S::kKeys;
    wait_for_keys();
    if constexpr (S::kRotates) new_rows_.template put<true>(tile, keys_.stage);
    start_qk();
    wgmma_wait<0>();
    finish_qk();
    rows_.template update_max<true>(a_, tile * S::kKeys);
    rows_.exponentiate(0);
    rows_.exponentiate(1);
    rows_.pack();
    clear_values(a_.seq_lens[work.seq] - tile * S::kKeys, S::kKeys);
    --tile;
    // All rows see all keys of the tiles from `seen` to before `masked`.
    const int masked = max(first, (work.first + 1) / S::kKeys);
    const int seen = div_up(a_.oldest(work.last), S::kKeys);
    for (; tile >= masked; --tile) step<true>(tile);
    for (; tile >= max(first, seen); --tile) step<false>(tile);
    for (; tile >= first; --tile) step<true>(tile);
    if constexpr (!S::kQueryInRegisters && !S::kFixedSplits) release_queries();
    put_new_values(first);
    clear_values(0, work.oldest - begin);
    start_pv();
    wgmma_wait<0>();
    finish_pv();
  }

  // Q @ Kᵀ of a tile, and P @ V of the one before.
  template <bool is_masked>
  __device__ __forceinline__ void step(int tile) {
    wait_for_keys();
    if constexpr (S::kRotates) new_rows_.template put<true>(tile, keys_.stage);
    put_new_values(tile + 1);
    wait_for_turn();
    start_qk();
    start_pv();
    pass_turn();
    wgmma_wait<1>();
    finish_qk();
    const float2 keep = rows_.template update_max<is_masked>(a_, tile * S::kKeys);
    rows_.rescale_sums(keep);
    rows_.exponentiate(0);
    wgmma_wait<0>();
    finish_pv();
    rows_.exponentiate(1);
    rows_.pack();  // beside the exponentials, which take the most time here
    rows_.rescale_out(keep);
  }

  __device__ __forceinline__ void wait_for_keys() {
    wait_barrier(shared_address(&shared_.keys_full[keys_.stage]), keys_.parity);
  }

  __device__ __forceinline__ void wait_for_values() {
    wait_barrier(shared_address(&shared_.values_full[values_.stage]), values_.parity);
  }

  __device__ __forceinline__ void start_qk() {
    wgmma_fence();
    pin(rows_.scores), pin(rows_.out), pin(rows_.weights);
    const uint64_t left =
        tile_descriptor(shared_address(shared_.query[queries_.stage] + warpgroup_ * 64 * kPanelColumns), 0);
    const uint64_t right = tile_descriptor(shared_address(shared_.keys[keys_.stage]), 0);
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k) {
      const int panel = k / 4, inside = k % 4 * 32;  // bytes
      const uint64_t from_left = left + (panel * S::kRows * kPanelRowBytes + inside) / 16;
      const uint64_t from_right = right + (panel * S::kKeys * kPanelRowBytes + inside) / 16;
      if constexpr (S::kQueryInRegisters) {
        if (k == 0)
          wgmma_registers<Math, 0, 0>(rows_.scores, rows_.query + 4 * k, from_right);
        else
          wgmma_registers<Math, 1, 0>(rows_.scores, rows_.query + 4 * k, from_right);
      } else if (k == 0) {
        wgmma_panels<Math, 0>(rows_.scores, from_left, from_right);
      } else {
        wgmma_panels<Math, 1>(rows_.scores, from_left, from_right);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void finish_qk() {
    pin(rows_.scores);
    release(shared_address(&shared_.keys_empty[keys_.stage]));
    keys_.advance();
  }

  __device__ __forceinline__ void start_pv() {
    wait_for_values();
    wgmma_fence();
    pin(rows_.out), pin(rows_.weights);
    const uint64_t right = tile_descriptor(shared_address(shared_.values[values_.stage]), S::kKeys * kPanelRowBytes);
#pragma unroll
    for (int k = 0; k < S::kKeys / 16; ++k)
      wgmma_registers<Math, 1, 1>(rows_.out, rows_.weights + 4 * k, right + k * 16 * kPanelRowBytes / 16);
    wgmma_commit();
  }

  __device__ __forceinline__ void finish_pv() {
    pin(rows_.out), pin(rows_.weights);
    release(shared_address(&shared_.values_empty[values_.stage]));
    values_.advance();
  }

  __device__ __forceinline__ void put_new_values([[maybe_unused]] int tile) {
    if constexpr (S::kRotates) {
      wait_for_values();
      new_rows_.template put<false>(tile, values_.stage);
    }
  }

  // Puts zeros before the oldest key and behind the last, where anything may lie: probabilities of zero do not undo a
  // NaN.
  __device__ __forceinline__ void clear_values(int begin, int end) {
    if (begin >= end) return;
    wait_for_values();
    uint4* values = reinterpret_cast<uint4*>(shared_.values[values_.stage]);
    const int units = (end - begin) * 8;  // of a panel
    for (int i = static_cast<int>(threadIdx.x); i < units * S::kPanels; i += S::kRowThreads)
      values[i / units * S::kKeys * 8 + begin * 8 + i % units] = uint4{0, 0, 0, 0};
    fence_shared_for_async();
    sync_threads(kRowThreadsBarrier, S::kRowThreads);
  }

  // By every thread, since each has read `work`.
  __device__ __forceinline__ void release_queries() { arrive(shared_address(&shared_.query_empty[queries_.stage])); }

  __device__ __forceinline__ void release(uint32_t empty) {
    __syncwarp();
    if (lane_id() == 0) arrive(empty);
  }

  __device__ __forceinline__ void wait_for_turn() {
    if constexpr (S::kWarpgroups > 1) sync_threads(kTurnBarrier + warpgroup_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (S::kWarpgroups == 1) return;
    const int next = warpgroup_ + 1 == S::kWarpgroups ? 0 : warpgroup_ + 1;
    arrive_threads(kTurnBarrier + next, 2 * kWarpgroup);
  }

  // Writes the rows, or stores them as partial results that the last split to arrive merges.
  __device__ __forceinline__ void finish(const Work& work) {
    if constexpr (!S::kFixedSplits) rows_.end();
    if (work.num_splits == 1) return rows_.write(a_, work);
    if constexpr (S::kDecodes)
      rows_.store_partial(slot_of<S>(a_, fixed_, work, work.split), fixed_.partial_rows, work.rows);
    else
      rows_.store_partial(Partial<S>(a_, work, work.split));
    sync_threads(kRowThreadsBarrier, S::kRowThreads);
    if (threadIdx.x == 0) shared_.merges = count_arrival(a_.arrivals, work);
    sync_threads(kRowThreadsBarrier, S::kRowThreads);
    if (!shared_.merges) return;
    if constexpr (S::kDecodes)
      merge_slots<S>(a_, fixed_, work);
    else
      merge_splits<S>(a_, work);
  }

  const typename S::Call& a_;
  HopperShared<S>& shared_;
  const FixedSplits& fixed_;
  const int warpgroup_;
  NewRows<S> new_rows_;
  PipelineState<S::kQueryStages> queries_;
  PipelineState<S::kKeyStages> keys_;
  PipelineState<S::kValueStages> values_;
  HopperSoftmax<S> rows_;
};

template <typename S>
__device__ __forceinline__ void init_barriers(HopperShared<S>& shared) {
  const auto init = [](auto& full, auto& empty, uint32_t arrivals) {
    for (auto& barrier : full) init_barrier(shared_address(&barrier), 1);
    for (auto& barrier : empty) init_barrier(shared_address(&barrier), arrivals);
  };
  init(shared.query_full, shared.query_empty,
       S::kRowThreads + 64);  // the producers of keys and values read `work`, too
  init(shared.keys_full, shared.keys_empty, S::kRowThreads / 32);
  init(shared.values_full, shared.values_empty, S::kRowThreads / 32);
  if constexpr (S::kConverts)
    for (int stage = 0; stage < S::kStored; ++stage) {
      init_barrier(shared_address(&shared.stored_keys_full[stage]), 1);
      init_barrier(shared_address(&shared.stored_values_full[stage]), 1);
    }
  publish_barriers();
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kLeastBlocks)
    hopper_attention_kernel(const __grid_constant__ typename S::Parameters a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint4 memory[];
  static_assert(sizeof(HopperShared<S>) + 1023 <= S::kSharedBytes, "room to begin at a multiple of 1024");
  auto& shared =
      *reinterpret_cast<HopperShared<S>*>(reinterpret_cast<char*>(memory) + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) init_barriers(shared);
  if (threadIdx.x == 32) {
    if constexpr (!S::kDecodes) prefetch_tensor_map(&a.query_map);
    prefetch_tensor_map(&a.key_map), prefetch_tensor_map(&a.value_map);
  }
  __syncthreads();
  start_successor();
  if constexpr (!S::kDecodes) wait_for_predecessor();
  if (threadIdx.x >= S::kRowThreads) {
    if constexpr (S::kDividesRegisters) deallocate_registers<S::kProducerRegisters>();
    const auto warp = (threadIdx.x - S::kRowThreads) / 32;
    if constexpr (S::kDecodes) {
      if (warp == 0) HopperDecodeScheduler<S>(a, shared).run();
    } else {
      if (warp == 0) HopperQueryProducer<S>(a, shared).run();
    }
    if constexpr (S::kConverts) {
      if (warp == 1)
        HopperKVConverter<S>(a, a.key_map, shared, shared.stored_keys, shared.stored_keys_full, shared.keys,
                             shared.keys_full, shared.keys_empty)
            .run();
      if (warp == 2)
        HopperKVConverter<S>(a, a.value_map, shared, shared.stored_values, shared.stored_values_full, shared.values,
                             shared.values_full, shared.values_empty)
            .run();
    } else {
      if (warp == 1)
        HopperKVProducer<S, S::kKeyStages>(a, a.key_map, shared, shared.keys, shared.keys_full, shared.keys_empty)
            .run();
      if (warp == 2)
        HopperKVProducer<S, S::kValueStages>(a, a.value_map, shared, shared.values, shared.values_full,
                                             shared.values_empty)
            .run();
    }
  } else {
    if constexpr (S::kDividesRegisters) allocate_registers<S::kConsumerRegisters>();
    HopperConsumer<S>(a, shared).run();
  }
#else
  __trap();  // launched on compute capability 9.0 alone
#endif
}

}  // namespace lamina
