// The producer warps of the kernel for Hopper: one schedules work and loads its queries by TMA, the others load the
// keys and the values, perhaps still of the work before.
#pragma once

#include "hopper_shape.cuh"

namespace lamina {

// Whether no kernel ahead writes keys or values of a sequence, since this one does.
template <typename T, bool kRotates>
__device__ __forceinline__ bool writes_its_keys([[maybe_unused]] const PagedAttention<T, T, kRotates>& a,
                                                [[maybe_unused]] const WorkTile& work) {
  if constexpr (kRotates) return a.slots[work.start] >= 0;
  return false;
}

// The producer warp of all keys, or of all values: tile by tile through a multi-stage pipeline. Lane i loads a box of
// one panel; boxes of the same keys are neighbours.
template <typename S, int kStages>
class HopperKVProducer {
  using T = typename S::T;

 public:
  __device__ __forceinline__ HopperKVProducer(const typename S::Parameters& a, const CUtensorMap& map,
                                              HopperShared<S>& shared, T (*tiles)[S::kKeys * S::kDim], uint64_t* full,
                                              uint64_t* empty)
      : a_(a),
        map_(map),
        shared_(shared),
        tiles_(shared_address(tiles)),
        full_(shared_address(full)),
        empty_(shared_address(empty)) {}

  __device__ __forceinline__ void run() {
    for (PipelineState<S::kQueryStages> state;; state.advance()) {
      wait_barrier(shared_address(&shared_.query_full[state.stage]), state.parity);
      const WorkTile work = shared_.work[state.stage];
      if (work.rows == 0) return;
      // By every lane, since each has read `work`. In decode of many sequences not before the last tile's load has
      // started: work that is taken earlier would wait here, while blocks that begin later have none.
      if constexpr (!kBeginsEarly) arrive(shared_address(&shared_.query_empty[state.stage]));
      if constexpr (S::kRotates)
        if (!writes_its_keys(a_.call, work)) wait_for_predecessor();  // which may have written some
      load(work);
      if constexpr (kBeginsEarly) arrive(shared_address(&shared_.query_empty[state.stage]));
    }
  }

 private:
  static constexpr bool kBeginsEarly = S::kDecodes && !S::kRotates;
  static constexpr int kBoxes = S::kPanels * S::kKeys / S::kBoxKeys;  // of a tile
  static_assert(kStages * kBoxes <= 32, "a lane has a box of the first tiles");

  __device__ __forceinline__ void load(const WorkTile& work) {
    const int32_t* table = a_.call.block_tables + work.seq * a_.call.block_tables_stride;
    const int end = a_.call.seq_lens[work.seq];
    const int lane_key = lane_id() / S::kPanels * S::kBoxKeys, column = lane_id() % S::kPanels * kPanelColumns;
    const uint32_t offset = offset_of(lane_key, column);
    int tile = (work.end - 1) / S::kKeys * S::kKeys;  // its first key
    if constexpr (kBeginsEarly)
      if (!has_begun_) tile = begin(work, table, end, tile);
    int block = look_up(table, tile + lane_key, work.oldest, end);
#pragma unroll 1  // copies of the loop would not fit into the registers that are left to this warp
    for (; tile >= work.begin; tile -= S::kKeys) {
      const int key = tile + lane_key;
      const int next = look_up(table, key - S::kKeys, work.oldest, end);  // loaded a tile ahead: it takes long
      const bool loads = lane_key < S::kKeys && key < end;
      const int boxes = __popc(__ballot_sync(kAllLanes, loads));
      const uint32_t full = full_ + state_.stage * sizeof(uint64_t);
      wait_barrier(empty_ + state_.stage * sizeof(uint64_t), state_.parity ^ 1);
      if (lane_id() == 0) arrive_expecting(full, boxes * S::kBoxKeys * kPanelRowBytes);
      __syncwarp();
      if (loads) start(state_.stage, offset, column, key, block, work.kv_head);
      __syncwarp();
      state_.advance();
      block = next;
    }
  }

  // Loads as many tiles of the first work as there are stages, all at once, before the kernel ahead has ended: but for
  // keys that it may write. Returns the tile behind them.
  __device__ __forceinline__ int begin(const WorkTile& work, const int32_t* table, int end, int last) {
    const int stage = lane_id() / kBoxes, box = lane_id() % kBoxes, tile = last - stage * S::kKeys;
    const int row = box / S::kPanels * S::kBoxKeys, column = box % S::kPanels * kPanelColumns, key = tile + row;
    const bool is_there = stage < kStages && tile >= work.begin, loads = is_there && key < end;
    const int block = loads ? look_up(table, key, work.oldest, end) : 0;
    const bool is_settled = key + S::kBoxKeys <= work.settled;
    const int boxes = __popc(__ballot_sync(kAllLanes, loads) >> stage * kBoxes & ((1u << kBoxes) - 1));
    if (is_there && box == 0) arrive_expecting(full_ + stage * sizeof(uint64_t), boxes * S::kBoxKeys * kPanelRowBytes);
    __syncwarp();
    if (loads && is_settled) start(stage, offset_of(row, column), column, key, block, work.kv_head);
    wait_for_predecessor();
    if (loads && !is_settled) start(stage, offset_of(row, column), column, key, block, work.kv_head);
    __syncwarp();
    has_begun_ = true;
    const int count = min(kStages, (last - work.begin) / S::kKeys + 1);
    for (int i = 0; i < count; ++i) state_.advance();
    return last - count * S::kKeys;
  }

  // Of a box in its tile.
  static __device__ __forceinline__ uint32_t offset_of(int row, int column) {
    return (column * S::kKeys + row * kPanelColumns) * sizeof(T);
  }

  // Starts to load the box that begins at this key and column.
  __device__ __forceinline__ void start(int stage, uint32_t offset, int column, int key, int block, int kv_head) const {
    tma_load(tiles_ + stage * S::kKeys * S::kDim * sizeof(T) + offset, map_, column, kv_head, key & a_.block_mask,
             block, full_ + stage * sizeof(uint64_t));
  }

  // The block id of a box from the block table, or any block where none of its keys is visible.
  __device__ __forceinline__ int look_up(const int32_t* table, int key, int oldest, int end) const {
    return key < end && key + S::kBoxKeys > oldest ? table[key >> a_.block_shift] : 0;
  }

  const typename S::Parameters& a_;
  const CUtensorMap& map_;
  HopperShared<S>& shared_;
  const uint32_t tiles_, full_, empty_;
  PipelineState<kStages> state_;
  bool has_begun_ = false;  // where tiles are begun early
};

// The producer warp that schedules work and loads its queries.
template <typename S>
class HopperQueryProducer {
  using T = typename S::T;

 public:
  __device__ __forceinline__ HopperQueryProducer(const typename S::Parameters& a, HopperShared<S>& shared)
      : h_(a), a_(a.call), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int num_work = a_.num_tiles * a_.num_kv_heads * a_.num_splits;
    for (int index = static_cast<int>(blockIdx.x);; index = next_index(num_work)) {
      WorkTile work;
      bool found = false;
      while (index < num_work && !(found = find_work<S>(a_, index / a_.num_splits, index % a_.num_splits, work)))
        index = next_index(num_work);
      if (!found) work.rows = 0;
      if (lane_id() == 0) load_queries(work);
      if (!found) return;
      state_.advance();
      // Taken any earlier, work would wait here while other blocks have none.
      wait_barrier(shared_address(&shared_.query_empty[state_.stage]), state_.parity ^ 1);
    }
  }

 private:
  // The next work from the tile counter. Each block takes until it has taken one too many; the last to do so resets the
  // counter.
  __device__ __forceinline__ int next_index(int num_work) const {
    int drawn = 0;
    if (lane_id() == 0) {
      drawn = atomicAdd(h_.tile_counter, 1);
      if (drawn == num_work - 1) *h_.tile_counter = 0;
    }
    return __shfl_sync(kAllLanes, drawn, 0) + static_cast<int>(gridDim.x);
  }

  __device__ __forceinline__ void load_queries(const WorkTile& work) const {
    const uint32_t full = shared_address(&shared_.query_full[state_.stage]);
    shared_.work[state_.stage] = work;
    if (work.rows == 0) return arrive(full);
    const int tokens = S::kRows / a_.group;
    arrive_expecting(full, tokens * a_.group * S::kDim * static_cast<int>(sizeof(T)));
    const T* to = shared_.query[state_.stage];
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel)
      tma_load(shared_address(to + panel * S::kRows * kPanelColumns), h_.query_map, panel * kPanelColumns, 0,
               work.kv_head, work.start + work.first_row / a_.group, full);
  }

  const typename S::Parameters& h_;
  const typename S::Call& a_;
  HopperShared<S>& shared_;
  PipelineState<S::kQueryStages> state_;
};

}  // namespace lamina
