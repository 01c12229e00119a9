// Multi-stage cp.async pipeline of keys and values from the paged cache to shared memory.
#pragma once

#include "cache_policy.cuh"
#include "tile_scheduler.cuh"

namespace lamina {

// A team's tiles of keys and values; each warp copies sixteen keys of a tile.
template <typename S>
class KVPipeline {
  using T = typename S::Cached;
  static constexpr uint32_t kNoRow = 0xffffffffu;
  static constexpr int kChunks = S::kDim * static_cast<int>(sizeof(T)) / 16;  // of a row; 16 bytes each
  static constexpr int kPartElements = S::kTileKeys * S::kPitch;              // keys of a tile, then values

 public:
  __device__ __forceinline__ KVPipeline(const typename S::Call& a, const WorkTile& work, T* memory)
      : keys_(a.key_cache + static_cast<int64_t>(work.kv_head) * a.key_strides.head),
        values_(a.value_cache + static_cast<int64_t>(work.kv_head) * a.value_strides.head),
        table_(a.block_tables + work.seq * a.block_tables_stride),
        key_strides_(a.key_strides),
        value_strides_(a.value_strides),
        block_size_(a.block_size),
        chunks_(a.head_dim * static_cast<int>(sizeof(T)) / 16),
        end_(work.end),
        settled_(work.settled),
        policy_(S::kMany ? evict_normal() : evict_first()) {
    const int warp = static_cast<int>(threadIdx.x) / 32, team = warp / S::kTeamWarps;
    warp_row_ = warp % S::kTeamWarps * 16;
    first_ = work.begin + team * S::kTileKeys;
    memory_ = memory + team * S::kStages * 2 * kPartElements;
  }

  __device__ __forceinline__ int first_key(int tile) const { return first_ + tile * S::kTileKeys * S::kTeams; }
  __device__ __forceinline__ int num_tiles() const {
    return first_ < end_ ? div_up(end_ - first_, S::kTileKeys * S::kTeams) : 0;
  }
  __device__ __forceinline__ T* keys(int stage) const { return memory_ + stage * 2 * kPartElements; }
  __device__ __forceinline__ T* values(int stage) const { return keys(stage) + kPartElements; }

  // Whether no kernel of this step writes any of the tile's keys, so that it may be copied before the kernel ahead has
  // ended.
  __device__ __forceinline__ bool settled(int tile) const { return first_key(tile) + S::kTileKeys <= settled_; }

  // Looks the keys of a tile up in the block table, one a lane; started early, since it waits for the table.
  __device__ __forceinline__ void look_up(int tile) {
    const int key = first_key(tile) + warp_row_ + lane_id() % 16;
    key_row_ = value_row_ = kNoRow;
    if (key < end_) {
      const uint32_t index = static_cast<uint32_t>(key) / block_size_, token = static_cast<uint32_t>(key) % block_size_;
      const uint32_t block = static_cast<uint32_t>(table_[index]);
      key_row_ = block * key_strides_.block + token * key_strides_.token;
      value_row_ = block * value_strides_.block + token * value_strides_.token;
    }
  }

  // Starts to copy the tile that was looked up; rows and columns outside are zeros.
  __device__ __forceinline__ void start(int stage) const {
    T *to_keys = keys(stage) + warp_row_ * S::kPitch, *to_values = values(stage) + warp_row_ * S::kPitch;
#pragma unroll
    for (int i = 0; i < 16 * kChunks / 32; ++i) {
      const int index = i * 32 + lane_id(), row = index / kChunks, chunk = index % kChunks;
      const uint32_t key_row = __shfl_sync(kAllLanes, key_row_, row);
      const uint32_t value_row = __shfl_sync(kAllLanes, value_row_, row);
      const bool inside = key_row != kNoRow && chunk < chunks_;
      const int offset = row * S::kPitch + chunk * (16 / static_cast<int>(sizeof(T)));
      copy_async(to_keys + offset, keys_ + (inside ? static_cast<int64_t>(key_row) + chunk : 0), inside, policy_);
      copy_async(to_values + offset, values_ + (inside ? static_cast<int64_t>(value_row) + chunk : 0), inside, policy_);
    }
  }

 private:
  const uint4 *keys_, *values_;
  const int32_t* table_;
  Strides key_strides_, value_strides_;
  uint32_t block_size_, key_row_, value_row_;
  int chunks_, end_, settled_, warp_row_, first_;
  uint64_t policy_;
  T* memory_;
};

}  // namespace lamina
