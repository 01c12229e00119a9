// The parameters of a launch, the constants of its kernel, and the tile scheduler: which part of the work a block does.
#pragma once

#include "launch.cuh"
#include "warp_mma.cuh"

namespace lamina {

constexpr int kPipelineBytes = 72 * 1024;  // three blocks on an H100, one on the smallest GPU
constexpr int kMaxStages = 3;              // of a cache in 16 bits; of one in 8 twice as many

struct Strides {
  uint32_t block, token, head;  // in units of 16 bytes
};

// What values of the cache are to be multiplied by: 1 but where they are stored in FP8.
template <typename Cached>
struct ValueScale {
  static constexpr float value_scale = 1.0f;
};
template <>
struct ValueScale<Float8> {
  float value_scale;
};

// Of queries and outputs of type T, and keys and values of type Cached.
template <typename T, typename Cached = T>
struct PagedAttention : ValueScale<Cached> {
  T* out;
  const T* query;
  const uint4 *key_cache, *value_cache;
  const int32_t *block_tables, *seq_lens, *query_start_loc;
  float* partials;    // [units][splits] of Shape::kPartialFloats
  int32_t* arrivals;  // [units], zeros before and after
  int64_t out_token, out_head, query_token, query_head, block_tables_stride;
  Strides key_strides, value_strides;
  int num_seqs, num_tiles, num_splits, num_kv_heads, group, head_dim, block_size;
  int window;       // < 0: none
  int chunk;        // < 0: none
  float scale;      // scores become those of base 2: scale * dot, or where capped, cap * tanh(scale * dot)
  float cap;        // 0: none
  int fill_splits;  // as many as fill the GPU, of at least min_split_keys keys
  int min_split_keys, max_split_keys;
  int min_rows, max_rows;  // sequences with rows outside (min_rows, max_rows] are another launch's

  // The first key that a query sees.
  __device__ __forceinline__ int oldest(int position) const {
    return max(window < 0 ? 0 : max(0, position - window + 1), chunk < 0 ? 0 : position - position % chunk);
  }
};

// The constants of one kernel. Kind 0: 8 rows, 1: 16 rows, 2: many rows.
template <typename Element, typename CacheElement, int dim, int kind>
struct Shape {
  using T = Element;
  using Cached = CacheElement;
  using Call = PagedAttention<T, Cached>;
  using Parameters = Call;
  static constexpr bool kMany = kind == 2;
  static constexpr int kDim = dim;
  static constexpr int kFew = sizeof(Cached) == 1 ? 1 : 0;  // conversions take registers
  static constexpr int kTiles = !kMany           ? kind + 1
                                : sizeof(T) == 4 ? 2
                                : dim <= 64      ? 4 - kFew
                                : dim <= 128     ? 3 - kFew
                                                 : 1;
  static constexpr bool kWholeTokens = false;   // whether all rows of a token lie in one tile
  static constexpr bool kAlignedTiles = false;  // whether tiles of keys begin at multiples of their size
  using Mma = WarpMma<T, Cached, kDim, kTiles>;
  static constexpr int kPitch = Mma::kPitch;
  static constexpr int kRowBytes = kPitch * static_cast<int>(sizeof(Cached));
  static constexpr int kWarps = kDim * sizeof(T) <= 256 || (kMany && sizeof(T) == 2) ? 4 : 2;
  static constexpr int kThreads = 32 * kWarps, kRowThreads = kThreads;
  static constexpr int kTeamWarps = kMany ? kWarps : 1;  // that share a pipeline of keys
  static constexpr int kTeams = kWarps / kTeamWarps;
  static constexpr int kTileKeys = 16 * kTeamWarps;
  static constexpr int kWarpRows = 8 * kTiles;
  static constexpr int kRows = kWarpRows * kTeamWarps;
  static constexpr int kStageBytes = 2 * 16 * kWarps * kRowBytes;
  static constexpr int kMostStages = sizeof(Cached) == 1 ? 2 * kMaxStages : kMaxStages;
  static constexpr int kStages =
      kPipelineBytes / kStageBytes < kMostStages ? kPipelineBytes / kStageBytes : kMostStages;
  static constexpr int kQueryBytes = Mma::kQueryElements * static_cast<int>(sizeof(T));
  static constexpr int kResultPitch = kDim + 4;
  static constexpr int kResultBytes = kWarps * kWarpRows * (kResultPitch + 2) * 4;
  static constexpr int kWorkBytes = kStages * kStageBytes + kWarps * kQueryBytes;
  static constexpr int kSharedBytes = kWorkBytes > kResultBytes ? kWorkBytes : kResultBytes;
  static constexpr int kPartialFloats = kRows * (kDim + 2);
  static constexpr int kWholeKeys = !kMany && dim <= 64 ? 256 : 0;  // so few are quicker in one split
  static constexpr int kMinBlocks = kMany ? 2 : dim <= 64 ? 4 : 3;
  static_assert(kSharedBytes <= 99 * 1024, "the smallest GPUs have no more");
  static_assert(kStages >= 1, "one stage of keys and values must fit");
};

// A tile of work: query rows of one sequence and key-value head, by a split of their keys.
struct WorkTile {
  int seq, kv_head;
  int unit;             // all splits of the same rows
  int first_row, rows;  // row r is head r % group of the sequence's token r / group
  int start, past;      // the sequence's first query: its row of `query`, its position
  int first, last;      // positions of the queries of the first row and of the last
  int oldest;           // the first key that any row sees
  int begin, end;       // keys
  int settled;          // keys before this one were written by earlier steps
  int split, num_splits;
};

// Tiles are numbered so that a sequence's first one follows from what lies before it; some numbers stay unused.
__device__ __forceinline__ int first_tile(const int32_t* query_start_loc, int seq, int group, int rows) {
  return query_start_loc[seq] * group / rows + seq;
}

__device__ __forceinline__ int find_sequence(const int32_t* query_start_loc, int num_seqs, int group, int rows,
                                             int tile) {
  int count = 0;
  for (int base = 0; base < num_seqs; base += 32) {
    const int seq = base + lane_id();
    const bool begun = seq < num_seqs && first_tile(query_start_loc, seq, group, rows) <= tile;
    count += __popc(__ballot_sync(kAllLanes, begun));
  }
  return count - 1;
}

__device__ __forceinline__ int div_up(int count, int size) { return (count + size - 1) / size; }

// Split-KV: this block's part of the keys [begin, end) of a unit; false where it has none.
template <typename S>
__device__ __forceinline__ bool take_split(const typename S::Call& a, WorkTile& work) {
  constexpr int kSpan = S::kTileKeys * S::kTeams;
  work.num_splits = 1;
  if (a.num_splits == 1) return true;
  const int keys = work.end - work.begin;
  const int filling = keys <= S::kWholeKeys ? 1 : min(a.fill_splits, div_up(keys, a.min_split_keys));
  const int wanted = min(a.num_splits, max(filling, div_up(keys, a.max_split_keys)));
  const int share = div_up(div_up(keys, wanted), kSpan) * kSpan;
  work.num_splits = div_up(keys, share);
  work.begin += work.split * share;
  work.end = min(work.end, work.begin + share);
  return work.split < work.num_splits;
}

// The work of a split of a unit; false where there is none.
template <typename S>
__device__ __forceinline__ bool find_work(const typename S::Call& a, int unit, int split, WorkTile& work) {
  const int tile_rows = S::kWholeTokens ? S::kRows / a.group * a.group : S::kRows;
  const int position = unit / a.num_kv_heads;
  const int tile = S::kMany ? a.num_tiles - 1 - position : position;  // a prompt's last tiles see the most keys
  work.unit = unit, work.split = split;
  work.kv_head = unit % a.num_kv_heads;
  work.seq = S::kMany ? find_sequence(a.query_start_loc, a.num_seqs, a.group, tile_rows, tile) : tile;
  work.start = a.query_start_loc[work.seq];
  const int seq_len = a.seq_lens[work.seq];
  const int query_len = a.query_start_loc[work.seq + 1] - work.start;
  const int rows = query_len * a.group;
  work.first_row = S::kMany ? (tile - first_tile(a.query_start_loc, work.seq, a.group, tile_rows)) * tile_rows : 0;
  work.rows = min(tile_rows, rows - work.first_row);
  if (seq_len == 0 || work.rows <= 0 || rows <= a.min_rows || rows > a.max_rows) return false;
  work.past = seq_len - query_len;
  work.first = work.past + work.first_row / a.group;
  work.last = work.past + (work.first_row + work.rows - 1) / a.group;
  work.oldest = a.oldest(work.first);
  // A sequence of one new token may share the block that another's one new token completes: the last key before its
  // own.
  work.settled = query_len == 1 ? work.past - 1 : 0;
  work.begin = S::kAlignedTiles ? work.oldest / S::kTileKeys * S::kTileKeys : work.oldest;
  work.end = work.last + 1;
  return take_split<S>(a, work);
}

}  // namespace lamina
