// Multi-stage cp.async pipeline of keys and values from the paged cache to shared memory.
#pragma once

#include "cache_policy.cuh"
#include "tile_scheduler.cuh"

namespace lamina {

constexpr int kNoToken = -1;

// Which of the step's tokens the last two keys are of, where they are of this step: this sequence's own, and of one
// that completes a block which this one shares the last before it.
template <typename Call>
__device__ __forceinline__ void find_new_tokens(const Call& a, const WorkTile& work, int (&tokens)[2]) {
  const auto block_size = static_cast<uint32_t>(a.block_size);
  tokens[0] = a.slots[work.start] < 0 ? kNoToken : work.start;
  tokens[1] = kNoToken;
  if (work.last == 0 || static_cast<uint32_t>(work.last) % block_size != 0) return;
  const int32_t* table = a.block_tables + work.seq * a.block_tables_stride;
  const int slot = (table[work.last / block_size - 1] + 1) * static_cast<int>(block_size) - 1;
  for (int base = 0; base < a.num_tokens; base += 32) {
    const int token = base + lane_id();
    const unsigned found = __ballot_sync(kAllLanes, token < a.num_tokens && a.slots[token] == slot);
    if (found != 0) tokens[1] = base + __ffs(static_cast<int>(found)) - 1;
  }
}

// A team's tiles of keys and values; each warp copies sixteen keys of a tile.
template <typename S>
class KVPipeline {
  using T = typename S::Cached;
  static constexpr uint32_t kNoRow = 0xffffffffu, kNewRow = 0xfffffffeu;
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
        oldest_(work.oldest),
        end_(work.end),
        settled_(work.settled),
        policy_(S::kMany ? evict_normal() : evict_first()) {
    const int warp = static_cast<int>(threadIdx.x) / 32, team = warp / S::kTeamWarps;
    warp_row_ = warp % S::kTeamWarps * 16;
    first_ = work.begin + team * S::kTileKeys;
    memory_ = opaque(memory + team * S::kStages * 2 * kPartElements);
    if constexpr (S::kRotates) last_ = work.last, find_new_tokens(a, work, new_);
  }

  __device__ __forceinline__ int first_key(int tile) const { return first_ + tile * S::kTileKeys * S::kTeams; }
  __device__ __forceinline__ int num_tiles() const {
    return first_ < end_ ? div_up(end_ - first_, S::kTileKeys * S::kTeams) : 0;
  }
  __device__ __forceinline__ T* keys(int stage) const { return memory_ + stage * 2 * kPartElements; }
  __device__ __forceinline__ T* values(int stage) const { return keys(stage) + kPartElements; }

  // Whether no kernel of this step writes any of the tile's keys that are copied, so that they may be before the kernel
  // ahead has ended.
  __device__ __forceinline__ bool settled(int tile) const {
    return first_key(tile) + S::kTileKeys <= settled_ || (S::kRotates && new_[0] != kNoToken);
  }

  // Looks the keys of a tile up in the block table, one a lane; started early, since it waits for the table.
  __device__ __forceinline__ void look_up(int tile) {
    const int key = first_key(tile) + warp_row_ + lane_id() % 16;
    key_row_ = value_row_ = kNoRow;
    if (key < end_ && (!S::kAlignedTiles || key >= oldest_)) {  // an aligned tile may begin before
      const uint32_t index = static_cast<uint32_t>(key) / block_size_, token = static_cast<uint32_t>(key) % block_size_;
      const uint32_t block = static_cast<uint32_t>(table_[index]);
      if (S::kRotates && token_of(key) != kNoToken) {
        value_row_ = kNewRow;  // and no row of keys
        return;
      }
      key_row_ = block * key_strides_.block + token * key_strides_.token;
      value_row_ = block * value_strides_.block + token * value_strides_.token;
    }
  }

  // Starts to copy the tile that was looked up; rows and columns outside are zeros, those of this step are left out.
  __device__ __forceinline__ void start(int stage) const {
    T *to_keys = keys(stage) + warp_row_ * S::kPitch, *to_values = values(stage) + warp_row_ * S::kPitch;
#pragma unroll
    for (int i = 0; i < 16 * kChunks / 32; ++i) {
      const int index = i * 32 + lane_id(), row = index / kChunks, chunk = index % kChunks;
      const uint32_t key_row = __shfl_sync(kAllLanes, key_row_, row);
      const uint32_t value_row = __shfl_sync(kAllLanes, value_row_, row);
      const bool inside = key_row != kNoRow && chunk < chunks_;
      const int offset = row * S::kPitch + chunk * (16 / static_cast<int>(sizeof(T)));
      const uint4* from_keys = keys_ + (inside ? static_cast<int64_t>(key_row) + chunk : 0);
      const uint4* from_values = values_ + (inside ? static_cast<int64_t>(value_row) + chunk : 0);
      if constexpr (S::kRotates) {
        const bool is_new = value_row == kNewRow;
        copy_async_unless(is_new, to_keys + offset, from_keys, inside, policy_);
        copy_async_unless(is_new, to_values + offset, from_values, inside, policy_);
      } else {
        copy_async(to_keys + offset, from_keys, inside, policy_);
        copy_async(to_values + offset, from_values, inside, policy_);
      }
    }
  }

  // Puts keys and values of this step into their rows of a tile, and this sequence's own into the cache.
  __device__ __forceinline__ void put_new(const typename S::Call& a, const WorkTile& work, int tile, int stage) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = last_ - i, row = key - first_key(tile);
      if (new_[i] != kNoToken && row >= 0 && row < S::kTileKeys && key < end_)
        put_row(a, work, new_[i], stage, row, i == 0);
    }
  }

 private:
  __device__ __forceinline__ int token_of(int key) const {
    return key == last_ ? new_[0] : key == last_ - 1 ? new_[1] : kNoToken;
  }

  __device__ __forceinline__ void put_row(const typename S::Call& a, const WorkTile& work, int token, int stage,
                                          int row, bool is_own) const {
    using In = typename S::T;
    constexpr int kWidth = kVecWidth<In>, kHalf = S::kDim / 2, kVecs = kHalf / kWidth;
    for (int index = lane_id(); index < 2 * kVecs; index += 32) {
      const bool is_key = index < kVecs;
      const int column = index % kVecs * kWidth;
      const In* from = (is_key ? a.key : a.value).at(token, work.kv_head) + column;
      Vec<In, kWidth> first = load<kWidth>(from), second = load<kWidth>(from + kHalf);
      if (is_key) {
        float cos[kWidth], sin[kWidth];
        load_floats(cos, a.cos + token * kHalf + column);
        load_floats(sin, a.sin + token * kHalf + column);
        rotate(first, second, cos, sin);
      }
      const float scale = is_key ? a.key_scale : a.value_scale;
      const auto low = cached_bits<T>(first, scale), high = cached_bits<T>(second, scale);
      put_bits((is_key ? keys(stage) : values(stage)) + row * S::kPitch + column, kHalf, low, high);
      if (!is_own) continue;
      const uint32_t slot = static_cast<uint32_t>(a.slots[token]);
      const Strides& strides = is_key ? key_strides_ : value_strides_;
      const int64_t units =
          static_cast<int64_t>(slot / block_size_) * strides.block + slot % block_size_ * strides.token;
      T* const to = reinterpret_cast<T*>(const_cast<uint4*>((is_key ? keys_ : values_) + units));
      put_bits(to + column, kHalf, low, high);
    }
  }

  template <typename Bits>
  static __device__ __forceinline__ void put_bits(T* to, int half, const Bits& low, const Bits& high) {
    *reinterpret_cast<Bits*>(to) = low;
    *reinterpret_cast<Bits*>(to + half) = high;
  }

  const uint4 *keys_, *values_;
  const int32_t* table_;
  Strides key_strides_, value_strides_;
  uint32_t block_size_, key_row_, value_row_;
  int chunks_, oldest_, end_, settled_, warp_row_, first_;
  int last_, new_[2];  // where S::kRotates: the last key; its token and that of the key before it
  uint64_t policy_;
  T* memory_;
};

}  // namespace lamina
