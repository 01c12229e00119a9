// Queries, keys and values on their way to the shared memory of a block of Hopper's kernel: boxes of as many rows of
// the paged cache as lie behind one another.
#pragma once

#include "hopper_shape.cuh"

namespace lamina {

// The warp that brings everything.
template <typename S>
class HopperProducer {
  using T = typename S::T;

 public:
  __device__ __forceinline__ HopperProducer(const HopperAttention<T>& a, HopperShared<S>& shared)
      : h_(a), a_(a.call), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int num_work = a_.num_tiles * a_.num_kv_heads * a_.num_splits;
    int ticket = static_cast<int>(blockIdx.x);
    for (uint32_t parity = 1;; parity ^= 1) {
      Work work;
      bool found = false;
      while (ticket < num_work && !(found = find_work<S>(a_, ticket / a_.num_splits, ticket % a_.num_splits, work)))
        ticket = next_ticket(num_work);
      if (!found) work.rows = 0;
      wait_barrier(shared_address(&shared_.query_empty), parity);
      if (lane_id() == 0) bring_queries(work);
      if (!found) return;
      bring_tiles(work);
      ticket = next_ticket(num_work);
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
    const uint32_t full = shared_address(&shared_.query_full);
    shared_.work = work;
    if (work.rows == 0) return arrive(full);
    const int tokens = S::kRows / a_.group;
    arrive_expecting(full, tokens * a_.group * S::kDim * static_cast<int>(sizeof(T)));
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel)
      copy_box(shared_.query + panel * S::kRows * kPanelColumns, h_.query_map, panel * kPanelColumns, 0, work.kv_head,
               work.start + work.first_row / a_.group, full);
  }

  __device__ __forceinline__ void bring_tiles(const Work& work) {
    const int32_t* table = a_.block_tables + work.seq * a_.block_tables_stride;
    const int end = a_.seq_lens[work.seq], first = work.begin / S::kKeys;
    int tile = (work.end - 1) / S::kKeys;
    int block = look_up(table, tile, work.oldest, end);
    for (; tile >= first; --tile) {
      const int next = tile > first ? look_up(table, tile - 1, work.oldest, end) : 0;  // its way is long
      const int boxes = div_up(min(end - tile * S::kKeys, S::kKeys), h_.box_keys);
      bring(shared_.keys[ring_.stage], h_.key_map, shared_address(&shared_.keys_full[ring_.stage]),
            shared_address(&shared_.keys_empty[ring_.stage]), work.kv_head, tile, block, boxes);
      bring(shared_.values[ring_.stage], h_.value_map, shared_address(&shared_.values_full[ring_.stage]),
            shared_address(&shared_.values_empty[ring_.stage]), work.kv_head, tile, block, boxes);
      ring_.advance();
      block = next;
    }
  }

  // Lane i finds the block of the tile's box i, of a box without keys to be seen any block.
  __device__ __forceinline__ int look_up(const int32_t* table, int tile, int oldest, int end) const {
    const int key = tile * S::kKeys + lane_id() * h_.box_keys;
    const bool wanted = lane_id() * h_.box_keys < S::kKeys && key < end && key + h_.box_keys > oldest;
    return wanted ? table[key / a_.block_size] : 0;
  }

  __device__ __forceinline__ void bring(T* to, const CUtensorMap& map, uint32_t full, uint32_t empty, int kv_head,
                                        int tile, int block, int boxes) const {
    wait_barrier(empty, ring_.parity ^ 1);
    if (lane_id() == 0) arrive_expecting(full, boxes * h_.box_keys * S::kDim * static_cast<int>(sizeof(T)));
    for (int box = 0; box < boxes; ++box) {
      const int from = __shfl_sync(kAllLanes, block, box), row = box * h_.box_keys;
      if (lane_id() != 0) continue;
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel)
        copy_box(to + (panel * S::kKeys + row) * kPanelColumns, map, panel * kPanelColumns, kv_head,
                 (tile * S::kKeys + row) % a_.block_size, from, full);
    }
    __syncwarp();
  }

  const HopperAttention<T>& h_;
  const PagedAttention<T>& a_;
  HopperShared<S>& shared_;
  Ring<S::kStages> ring_;
};

}  // namespace lamina
