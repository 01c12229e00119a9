// The parameters of a launch, the constants of its kernel, and the tile scheduler: which part of the work a block does.
#pragma once

#include <type_traits>

#include "kv_cache.cuh"
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

// What a kernel that rotates is given of the step's tokens, one a sequence: queries come as they are, keys and values
// are written to the cache.
template <typename T, typename Cached>
struct NewTokens : CacheScales<Cached> {
  Heads<const T> key, value;
  const float *cos, *sin;  // [num_tokens, head_dim / 2]
  const int32_t* slots;    // [num_tokens]; below 0: nothing is written
  int num_tokens;
};

// Of queries and outputs of type T, and keys and values of type Cached.
template <typename Element, typename CacheElement = Element, bool kRotates = false>
struct PagedAttention : std::conditional_t<kRotates, NewTokens<Element, CacheElement>, ValueScale<CacheElement>> {
  using T = Element;
  using Cached = CacheElement;
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
  int fill_splits;  // as many as fill the GPU, of at least min_split_keys keys: a block each
  int num_extra;    // blocks beside these, for splits of long sequences beyond
  int min_split_keys, max_split_keys;
  int min_rows, max_rows;  // sequences with rows outside (min_rows, max_rows] are another launch's

  // The first key that a query sees.
  __device__ __forceinline__ int oldest(int position) const {
    return max(window < 0 ? 0 : max(0, position - window + 1), chunk < 0 ? 0 : position - position % chunk);
  }
};

// The constants of one kernel. Kind 0: 8 rows, 1: 16 rows, 2: many rows.
template <typename Element, typename CacheElement, int dim, int kind, bool rotates = false>
struct Shape {
  using T = Element;
  using Cached = CacheElement;
  using Call = PagedAttention<T, Cached, rotates>;
  using Parameters = Call;
  static constexpr bool kMany = kind == 2, kRotates = rotates;
  static constexpr int kDim = dim;
  static constexpr int kFew = sizeof(Cached) == 1 ? 1 : 0;  // conversions take registers
  static constexpr int kTiles = !kMany           ? kind + 1
                                : sizeof(T) == 4 ? 2
                                : dim <= 64      ? 4 - kFew
                                : dim <= 128     ? 3 - kFew
                                                 : 1;
  static constexpr bool kWholeTokens = false;   // whether all rows of a token lie in one tile
  static constexpr bool kAlignedTiles = kMany;  // whether tiles of keys begin at multiples of their size
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

// Split-KV: how many keys of a unit each of its splits has, and how many splits there are.
struct Splits {
  int keys, count;
};

template <typename S>
__device__ __forceinline__ Splits splits_of(const typename S::Call& a, int keys) {
  constexpr int kSpan = S::kTileKeys * S::kTeams;
  if (a.num_splits == 1) return {keys, 1};
  const int filling = keys <= S::kWholeKeys ? 1 : min(a.fill_splits, div_up(keys, a.min_split_keys));
  const int wanted = min(a.num_splits, max(filling, div_up(keys, a.max_split_keys)));
  const int share = div_up(div_up(keys, wanted), kSpan) * kSpan;
  return {share, div_up(keys, share)};
}

// All keys of the rows of a unit; false where there are none.
template <typename S>
__device__ __forceinline__ bool find_unit(const typename S::Call& a, int unit, WorkTile& work) {
  const int tile_rows = S::kWholeTokens ? S::kRows / a.group * a.group : S::kRows;
  const int position = unit / a.num_kv_heads;
  const int tile = S::kMany ? a.num_tiles - 1 - position : position;  // a prompt's last tiles see the most keys
  work.unit = unit;
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
  return true;
}

// The work of a split of a unit; false where there is none.
template <typename S>
__device__ __forceinline__ bool find_work(const typename S::Call& a, int unit, int split, WorkTile& work) {
  if (!find_unit<S>(a, unit, work)) return false;
  const Splits splits = splits_of<S>(a, work.end - work.begin);
  work.split = split, work.num_splits = splits.count;
  work.begin += split * splits.keys;
  work.end = min(work.end, work.begin + splits.keys);
  return split < splits.count;
}

// The work of one of all splits beyond those that every unit has a block for; false where there are fewer. With such
// blocks for the longest sequence that there could be, most had nothing to do, and kept the kernel behind from
// starting.
template <typename S>
__device__ __forceinline__ bool find_extra_work(const typename S::Call& a, int index, WorkTile& work) {
  for (int base = 0; base < a.num_seqs; base += 32) {
    const int seq = base + lane_id();
    const bool found = seq < a.num_seqs && find_unit<S>(a, seq * a.num_kv_heads, work);
    const int own = found ? max(0, splits_of<S>(a, work.end - work.begin).count - a.fill_splits) * a.num_kv_heads : 0;
    int until = own;  // with those of lanes before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, until, distance);
      if (lane_id() >= distance) until += before;
    }
    const unsigned holders = __ballot_sync(kAllLanes, index < until);
    if (holders != 0) {
      const int lane = __ffs(static_cast<int>(holders)) - 1;
      const int rest = index - __shfl_sync(kAllLanes, until - own, lane);
      return find_work<S>(a, (base + lane) * a.num_kv_heads + rest % a.num_kv_heads,
                          a.fill_splits + rest / a.num_kv_heads, work);
    }
    index -= __shfl_sync(kAllLanes, until, 31);
  }
  return false;
}

}  // namespace lamina
