// The producer warps of keys and values in FP8 for Hopper: by TMA as they are stored, then to float16 in panels.
#pragma once

#include "hopper_shape.cuh"

namespace lamina {

// The producer warp of all keys, or of all values. The next tile is on its way while one is converted.
template <typename S>
class HopperKVConverter {
  using Stored = Float8 (*)[S::kKeys * S::kDim];
  using Tiles = typename S::Math (*)[S::kKeys * S::kDim];
  static constexpr int kRowUnits = S::kDim / 16;  // of 16 bytes as stored

 public:
  __device__ __forceinline__ HopperKVConverter(const typename S::Parameters& a, const CUtensorMap& map,
                                               HopperShared<S>& shared, Stored stored, uint64_t* stored_full,
                                               Tiles tiles, uint64_t* full, uint64_t* empty)
      : a_(a),
        map_(map),
        shared_(shared),
        stored_(stored),
        tiles_(tiles),
        stored_full_(shared_address(stored_full)),
        full_(shared_address(full)),
        empty_(shared_address(empty)) {}

  __device__ __forceinline__ void run() {
    for (PipelineState<S::kQueryStages> state;; state.advance()) {
      wait_barrier(shared_address(&shared_.query_full[state.stage]), state.parity);
      const WorkTile work = shared_.work[state.stage];
      if (work.rows == 0) return;
      arrive(shared_address(&shared_.query_empty[state.stage]));  // by every lane, since each has read `work`
      load(work);
    }
  }

 private:
  __device__ __forceinline__ void load(const WorkTile& work) {
    const int32_t* table = a_.call.block_tables + work.seq * a_.call.block_tables_stride;
    const int end = a_.call.seq_lens[work.seq];
    int tile = (work.end - 1) / S::kKeys * S::kKeys;  // its first key
    int key = tile + lane_id() * S::kBoxKeys;         // of the lane's box
    start(key, look_up(table, key, work.oldest, end), end, work.kv_head);
    int block = look_up(table, key - S::kKeys, work.oldest, end);  // a tile ahead of its copy: it takes long
#pragma unroll 1
    for (;; tile -= S::kKeys, key -= S::kKeys) {
      const bool more = tile - S::kKeys >= work.begin;
      const int next = look_up(table, key - 2 * S::kKeys, work.oldest, end);
      if (more) start(key - S::kKeys, block, end, work.kv_head);
      convert();
      if (!more) return;
      block = next;
    }
  }

  // Starts to copy the lane's box of a tile, if it has any; a box is whole rows.
  __device__ __forceinline__ void start(int key, int block, int end, int kv_head) {
    const int row = lane_id() * S::kBoxKeys;
    const bool loads = row < S::kKeys && key < end;
    const int boxes = __popc(__ballot_sync(kAllLanes, loads));
    const uint32_t full = stored_full_ + started_.stage * sizeof(uint64_t);
    if (lane_id() == 0) arrive_expecting(full, boxes * S::kBoxKeys * S::kDim);
    __syncwarp();
    if (loads)
      tma_load(shared_address(stored_[started_.stage] + row * S::kDim), map_, 0, kv_head, key & a_.block_mask, block,
               full);
    __syncwarp();
    started_.advance();
  }

  // Writes the oldest tile on its way as float16, once it has come and there is room.
  __device__ __forceinline__ void convert() {
    wait_barrier(stored_full_ + arrived_.stage * sizeof(uint64_t), arrived_.parity);
    wait_barrier(empty_ + state_.stage * sizeof(uint64_t), state_.parity ^ 1);
    const uint4* from = reinterpret_cast<const uint4*>(stored_[arrived_.stage]);
    uint4* to = reinterpret_cast<uint4*>(tiles_[state_.stage]);
#pragma unroll 2
    for (int i = lane_id(); i < S::kKeys * kRowUnits; i += 32) {
      const int row = i / kRowUnits, unit = i % kRowUnits * 2;  // of 8 columns
      const uint4 bytes = from[i];
      uint4 first, second;
      fp8_to_halves(first.x, first.y, bytes.x);
      fp8_to_halves(first.z, first.w, bytes.y);
      fp8_to_halves(second.x, second.y, bytes.z);
      fp8_to_halves(second.z, second.w, bytes.w);
      uint4* panel_row = to + (unit / 8 * S::kKeys + row) * 8;
      panel_row[unit % 8 ^ row % 8] = first;
      panel_row[(unit % 8 + 1) ^ row % 8] = second;
    }
    fence_shared_for_async();  // for WGMMA, and for the copy that takes the stored tile's place
    __syncwarp();
    if (lane_id() == 0) arrive(full_ + state_.stage * sizeof(uint64_t));
    arrived_.advance();
    state_.advance();
  }

  // The block id of a box from the block table, or any block where none of its keys is visible.
  __device__ __forceinline__ int look_up(const int32_t* table, int key, int oldest, int end) const {
    return key < end && key + S::kBoxKeys > oldest ? table[key >> a_.block_shift] : 0;
  }

  const typename S::Parameters& a_;
  const CUtensorMap& map_;
  HopperShared<S>& shared_;
  const Stored stored_;
  const Tiles tiles_;
  const uint32_t stored_full_, full_, empty_;
  PipelineState<S::kStored> started_, arrived_;
  PipelineState<S::kStages> state_;
};

}  // namespace lamina
