// Decoding on Hopper by fixed splits: which work there is, keys and values of this step, results of splits.
#pragma once

#include <climits>

#include "fixed_splits.cuh"
#include "hopper_shape.cuh"

namespace lamina {

// ---- the scheduler warp

__device__ __forceinline__ int sum_until_lane(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_id() >= distance) value += before;
  }
  return value;
}

// Finds work by the lengths of all sequences: a piece for each key-value head of one, or for each of its splits. Blocks
// take what comes next from an atomic counter.
template <typename S>
class HopperDecodeScheduler {
  using Work = typename S::Work;

 public:
  __device__ __forceinline__ HopperDecodeScheduler(const typename S::Parameters& a, HopperShared<S>& shared)
      : h_(a), a_(a.call), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (int index = static_cast<int>(blockIdx.x);; index = next_index()) {
      Work work;
      const bool found = find(index, work);
      if (!found) work.rows = 0;
      if (!found && index == 0) wait_for_predecessor();  // some block must
      if (lane_id() == 0) {
        shared_.work[state_.stage] = work;
        arrive(shared_address(&shared_.query_full[state_.stage]));
      }
      if (!found) return;
      state_.advance();
      // Taken any earlier, work would wait here while other blocks have none.
      wait_barrier(shared_address(&shared_.query_empty[state_.stage]), state_.parity ^ 1);
    }
  }

 private:
  // As HopperQueryProducer's. Launches before this one have put the counter back once the kernel ahead has ended.
  __device__ __forceinline__ int next_index() {
    wait_for_predecessor();
    Work none;
    if (total_ < 0) find(INT_MAX, none);
    int drawn = 0;
    if (lane_id() == 0) {
      drawn = atomicAdd(h_.tile_counter, 1);
      if (drawn == total_ - 1) *h_.tile_counter = 0;
    }
    return __shfl_sync(kAllLanes, drawn, 0) + static_cast<int>(gridDim.x);
  }

  // The work of this number; false, and how much there is in all, where there is none.
  __device__ __forceinline__ bool find(int index, Work& work) {
    int work_before = 0, slots_before = 0;
    for (int base = 0; base < a_.num_seqs; base += 32) {
      const int splits = num_splits(base + lane_id());
      const int slots = splits > 1 ? splits * a_.num_kv_heads : 0;
      const int slots_until = slots_before + sum_until_lane(slots);
      const bool divided = slots > 0 && slots_until <= h_.fixed.num_slots;
      const int own = divided ? slots : splits > 0 ? a_.num_kv_heads : 0;
      const int until = work_before + sum_until_lane(own);
      const unsigned holders = __ballot_sync(kAllLanes, index < until);
      if (holders != 0) {
        const int lane = __ffs(static_cast<int>(holders)) - 1;
        const int rest = index - __shfl_sync(kAllLanes, until - own, lane);
        work.num_splits = __shfl_sync(kAllLanes, divided ? splits : 1, lane);
        work.first_slot = __shfl_sync(kAllLanes, slots_until - slots, lane);
        choose(base + lane, rest, work);
        return true;
      }
      work_before = __shfl_sync(kAllLanes, until, 31), slots_before = __shfl_sync(kAllLanes, slots_until, 31);
    }
    total_ = work_before;
    return false;
  }

  // Into how many splits a sequence should be divided among blocks; 0 where it is none of this launch's.
  __device__ __forceinline__ int num_splits(int seq) const {
    WorkTile work;
    if (seq >= a_.num_seqs || !find_unit<S>(a_, seq * a_.num_kv_heads, work)) return 0;
    if (work.end - work.begin <= h_.fixed.whole_keys) return 1;
    return work.last / h_.fixed.keys - work.begin / h_.fixed.keys + 1;
  }

  // Of a sequence's work a piece: its last splits come first.
  __device__ __forceinline__ void choose(int seq, int rest, Work& work) const {
    find_unit<S>(a_, seq * a_.num_kv_heads + rest % a_.num_kv_heads, work);
    work.split = rest / a_.num_kv_heads;
    if (work.num_splits == 1) return;
    const int keys = h_.fixed.keys, split = work.last / keys - work.split;
    work.begin = max(work.begin, split * keys);
    work.end = min(work.end, (split + 1) * keys);
  }

  const typename S::Parameters& h_;
  const typename S::Call& a_;
  HopperShared<S>& shared_;
  PipelineState<S::kQueryStages> state_;
  int total_ = -1;  // not counted yet
};

// ---- keys and values of this step

// Those of a piece of work, which the consumer warpgroup puts into tiles from the cache, and writes there.
template <typename S>
class NewRows {
  using T = typename S::T;
  static constexpr int kHalf = S::kDim / 2, kVecs = kHalf / 8;

 public:
  __device__ __forceinline__ NewRows(const typename S::Call& a, HopperShared<S>& shared) : a_(a), shared_(shared) {}

  __device__ __forceinline__ void find(const WorkTile& work) {
    last_ = work.last, kv_head_ = work.kv_head;
    find_new_tokens(a_, work, tokens_);
  }

  // Puts keys, or values, into a tile that has arrived.
  template <bool is_key>
  __device__ __forceinline__ void put(int tile, int stage) const {
    bool has_new = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = last_ - i - tile * S::kKeys;
      if (tokens_[i] == kNoToken || row < 0 || row >= S::kKeys) continue;
      has_new = true;
      if (threadIdx.x < kVecs) put_row<is_key>(tokens_[i], row, stage, i == 0);
    }
    if (!has_new) return;
    fence_shared_for_async();
    sync_threads(kRowThreadsBarrier, S::kRowThreads);
  }

 private:
  template <bool is_key>
  __device__ __forceinline__ void put_row(int token, int row, int stage, bool is_own) const {
    const int unit = static_cast<int>(threadIdx.x);  // of 8 columns
    const T* from = (is_key ? a_.key : a_.value).at(token, kv_head_) + unit * 8;
    Vec<T, 8> first = load<8>(from), second = load<8>(from + kHalf);
    if constexpr (is_key) {
      float cos[8], sin[8];
      load_floats(cos, a_.cos + token * kHalf + unit * 8);
      load_floats(sin, a_.sin + token * kHalf + unit * 8);
      rotate(first, second, cos, sin);
    }
    uint4* panels = reinterpret_cast<uint4*>(is_key ? shared_.keys[stage] : shared_.values[stage]);
    put_unit(in_panels(panels, row, unit), first.raw), put_unit(in_panels(panels, row, unit + kVecs), second.raw);
    if (!is_own) return;
    const uint32_t slot = static_cast<uint32_t>(a_.slots[token]), size = static_cast<uint32_t>(a_.block_size);
    const Strides& strides = is_key ? a_.key_strides : a_.value_strides;
    const int64_t place = static_cast<int64_t>(slot / size) * strides.block + slot % size * strides.token +
                          static_cast<int64_t>(kv_head_) * strides.head + unit;
    uint4* to = const_cast<uint4*>(is_key ? a_.key_cache : a_.value_cache) + place;
    put_unit(to, first.raw), put_unit(to + kVecs, second.raw);
  }

  template <typename Raw>
  static __device__ __forceinline__ void put_unit(uint4* to, const Raw& raw) {
    *reinterpret_cast<Raw*>(to) = raw;
  }

  // Where a row of a tile has its unit of 8 columns.
  static __device__ __forceinline__ uint4* in_panels(uint4* panels, int row, int unit) {
    return panels + (unit / 8 * S::kKeys + row) * 8 + (unit % 8 ^ row % 8);
  }

  const typename S::Call& a_;
  HopperShared<S>& shared_;
  int last_, kv_head_, tokens_[2];  // the last key; of the step that it is of, and that the key before it is of
};

// ---- results of splits

template <typename S>
__device__ __forceinline__ float* slot_of(const typename S::Call& a, const FixedSplits& fixed, const DecodeWork& work,
                                          int split) {
  const int64_t slot = work.first_slot + split * a.num_kv_heads + work.kv_head;
  return a.partials + slot * fixed.partial_rows * (S::kDim + 2);
}

// Merges what the work's splits left, the last first, and writes the rows.
template <typename S>
__device__ __forceinline__ void merge_slots(const typename S::Call& a, const FixedSplits& fixed,
                                            const DecodeWork& work) {
  each_four<S>(work.rows, S::kDim, [&](int r, int d) {
    Merged all;
#pragma unroll 8
    for (int split = 0; split < work.num_splits; ++split) {
      const float* slot = slot_of<S>(a, fixed, work, split);
      const float4 part = *reinterpret_cast<const float4*>(slot + r * S::kDim + d);
      const float2 stats = reinterpret_cast<const float2*>(slot + fixed.partial_rows * S::kDim)[r];
      const MergeWeights by(all.max, stats.x);
      all.out = {by.merged(all.out.x, part.x), by.merged(all.out.y, part.y), by.merged(all.out.z, part.z),
                 by.merged(all.out.w, part.w)};
      all.sum = by.merged(all.sum, stats.y), all.max = by.max;
    }
    write_out(a, work, r, d, all);
  });
}

}  // namespace lamina
