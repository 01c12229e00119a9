// Queries, keys and values on their way to the shared memory of a block of Hopper's kernel, by three warps: one finds
// work and brings its queries, while the others still bring the keys and the values of the work before.
#pragma once

#include "hopper_shape.cuh"

namespace lamina {

// A warp that brings the keys of all work, or the values, tile by tile through a ring of stages. Lane i brings a box of
// one panel; those of the same keys are neighbours.
template <typename S>
class HopperTiles {
  using T = typename S::T;

 public:
  __device__ __forceinline__ HopperTiles(const HopperAttention<T>& a, const CUtensorMap& map, HopperShared<S>& shared,
                                         T (*tiles)[S::kKeys * S::kDim], uint64_t* full, uint64_t* empty)
      : a_(a),
        map_(map),
        shared_(shared),
        tiles_(shared_address(tiles)),
        full_(shared_address(full)),
        empty_(shared_address(empty)) {}

  __device__ __forceinline__ void run() {
    for (RingPosition<S::kQueryStages> ring;; ring.advance()) {
      wait_barrier(shared_address(&shared_.query_full[ring.stage]), ring.parity);
      const Work work = shared_.work[ring.stage];
      if (work.rows == 0) return;
      arrive(shared_address(&shared_.query_empty[ring.stage]));  // by every lane, since each has read `work`
      bring(work);
    }
  }

 private:
  __device__ __forceinline__ void bring(const Work& work) {
    const int32_t* table = a_.call.block_tables + work.seq * a_.call.block_tables_stride;
    const int end = a_.call.seq_lens[work.seq];
    const int lane_key = lane_id() / S::kPanels * S::kBoxKeys, column = lane_id() % S::kPanels * kPanelColumns;
    const uint32_t place = (column * S::kKeys + lane_key * kPanelColumns) * sizeof(T);
    int tile = (work.end - 1) / S::kKeys * S::kKeys;  // its first key
    int block = look_up(table, tile + lane_key, work.oldest, end);
#pragma unroll 1  // copies of the loop would not fit into the registers that are left to this warp
    for (; tile >= work.begin; tile -= S::kKeys) {
      const int key = tile + lane_key;
      const int next = look_up(table, key - S::kKeys, work.oldest, end);  // its way is long
      const bool brings = lane_key < S::kKeys && key < end;
      const int boxes = __popc(__ballot_sync(kAllLanes, brings));
      const uint32_t full = full_ + ring_.stage * sizeof(uint64_t);
      wait_barrier(empty_ + ring_.stage * sizeof(uint64_t), ring_.parity ^ 1);
      if (lane_id() == 0) arrive_expecting(full, boxes * S::kBoxKeys * kPanelRowBytes);
      __syncwarp();
      if (brings)
        copy_box(tiles_ + ring_.stage * S::kKeys * S::kDim * sizeof(T) + place, map_, column, work.kv_head,
                 key & a_.block_mask, block, full);
      __syncwarp();
      ring_.advance();
      block = next;
    }
  }

  // The block of a box, or any block where none of its keys is to be seen.
  __device__ __forceinline__ int look_up(const int32_t* table, int key, int oldest, int end) const {
    return key < end && key + S::kBoxKeys > oldest ? table[key >> a_.block_shift] : 0;
  }

  const HopperAttention<T>& a_;
  const CUtensorMap& map_;
  HopperShared<S>& shared_;
  const uint32_t tiles_, full_, empty_;
  RingPosition<S::kStages> ring_;
};

// The warp that finds work and brings its queries.
template <typename S>
class HopperQueries {
  using T = typename S::T;

 public:
  __device__ __forceinline__ HopperQueries(const HopperAttention<T>& a, HopperShared<S>& shared)
      : h_(a), a_(a.call), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int num_work = a_.num_tiles * a_.num_kv_heads * a_.num_splits;
    for (int ticket = static_cast<int>(blockIdx.x);; ticket = next_ticket(num_work)) {
      Work work;
      bool found = false;
      while (ticket < num_work && !(found = find_work<S>(a_, ticket / a_.num_splits, ticket % a_.num_splits, work)))
        ticket = next_ticket(num_work);
      if (!found) work.rows = 0;
      if (lane_id() == 0) bring_queries(work);
      if (!found) return;
      ring_.advance();
      // Drawn any earlier, work would wait here while other blocks have none.
      wait_barrier(shared_address(&shared_.query_empty[ring_.stage]), ring_.parity ^ 1);
    }
  }

 private:
  // Each block draws until it has drawn one too many; the last to do so leaves the counter as it was.
  __device__ __forceinline__ int next_ticket(int num_work) const {
    int drawn = 0;
    if (lane_id() == 0) {
      drawn = atomicAdd(h_.tickets, 1);
      if (drawn == num_work - 1) *h_.tickets = 0;
    }
    return __shfl_sync(kAllLanes, drawn, 0) + static_cast<int>(gridDim.x);
  }

  __device__ __forceinline__ void bring_queries(const Work& work) const {
    const uint32_t full = shared_address(&shared_.query_full[ring_.stage]);
    shared_.work[ring_.stage] = work;
    if (work.rows == 0) return arrive(full);
    const int tokens = S::kRows / a_.group;
    arrive_expecting(full, tokens * a_.group * S::kDim * static_cast<int>(sizeof(T)));
    const T* to = shared_.query[ring_.stage];
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel)
      copy_box(shared_address(to + panel * S::kRows * kPanelColumns), h_.query_map, panel * kPanelColumns, 0,
               work.kv_head, work.start + work.first_row / a_.group, full);
  }

  const HopperAttention<T>& h_;
  const PagedAttention<T>& a_;
  HopperShared<S>& shared_;
  RingPosition<S::kQueryStages> ring_;
};

}  // namespace lamina
