// The same in 16-bit types, on GPUs with clusters: an adapter is read once for all tokens of a window that have it.
//
// A cluster has the tokens of a window with one slot, and some outputs of one part. Its warps load what they read of A
// and B before the projection ahead has ended. Then each warp multiplies chunks of the columns for 8 tokens on tensor
// cores, in float32; the blocks send their sums to each other, add them up in the order of the blocks, and expand
// outputs of their own. A token's bits depend on its columns and rank alone.
#pragma once

#include "cuda_mma.cuh"
#include "kernel.cuh"

namespace lamina {

constexpr int kWindow = 32;                     // tokens, one a lane
constexpr int kRound = 8, kHalfRound = 4;       // tokens that are shrunk, and that are expanded, at a time
constexpr int kTileRank = 16, kTileSums = 128;  // of an mma: rows of A; sums, one a row and token
constexpr int kWarpColumns = 32;                // of a chunk: 8 a lane
constexpr int kHeldVecs = 2;                    // vectors of a row of B that are held: 16 ranks
constexpr int kPitch = kTileRank + 4;           // floats between two tokens' sums, in different banks
constexpr int kWarpFloats = kRound * kPitch;    // sums of a warp
constexpr int kWave = 264;                      // blocks that run at once: two on each of 132 SMs
constexpr int kChunkStride = kSegments * kLoraWarps * kWarpColumns;  // columns between two chunks of a warp
static_assert(kLoraWarps == kSegments, "warp i of a block sends to block i");

// Tiles of 16 rows of A.
template <typename T>
__host__ __device__ int rank_tiles(const Lora<T>& p) {
  return (p.rank + kTileRank - 1) / kTileRank;
}

// Places in a block's shared memory.
struct ClusterMemory {
  uint32_t partials, received, totals, sent;

  // Of warps; of blocks; added up; and the barrier that counts what is received.
  __host__ __device__ ClusterMemory(uint32_t begin, int tiles)
      : partials(begin),
        received(partials + static_cast<uint32_t>(tiles * kLoraWarps * kWarpFloats * 4)),
        totals(received + static_cast<uint32_t>(tiles * kSegments * kTileSums * 4)),
        sent(totals + static_cast<uint32_t>(tiles * kTileSums * 4)) {}
  __host__ __device__ uint32_t end() const { return sent + 16; }
};

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / 32; }

// Place of the bit that has n others below it; -1 without one.
__device__ __forceinline__ int nth_bit(unsigned mask, int n) {
#pragma unroll 1
  for (; n > 0; --n) mask &= mask - 1;
  return __ffs(static_cast<int>(mask)) - 1;
}

struct TokenWindow {
  int first, slot;         // its first token; the slot of this lane's
  unsigned same, leaders;  // lanes with this lane's slot; the first lane of each slot
};

template <typename T>
__device__ __forceinline__ TokenWindow window_of(const Lora<T>& p, int first) {
  const int lane = lane_index();
  const bool exists = first + lane < p.tokens;
  const int slot = exists ? max(p.slots[first + lane], -1) : -2;
  const unsigned same = __match_any_sync(kAllLanes, slot);
  const bool leads = exists && (same & ((1u << lane) - 1)) == 0;
  return {first, slot, same, __ballot_sync(kAllLanes, leads)};
}

// Tokens of a window with one slot.
struct TokenGroup {
  int slot, count, token;  // token: of lane i the i-th
};

__device__ __forceinline__ TokenGroup group_of(const TokenWindow& window, int index) {
  const int leader = nth_bit(window.leaders, index);
  const unsigned same = __shfl_sync(kAllLanes, window.same, leader);
  const int slot = __shfl_sync(kAllLanes, window.slot, leader);
  return {slot, __popc(same), window.first + nth_bit(same, lane_index())};
}

// Eight neighbours, or zeros.
template <typename T>
__device__ __forceinline__ Vec<T, 8> load_if(bool exists, const T* from) {
  Vec<T, 8> vec = {};
  if (exists) vec = load<8>(from);
  return vec;
}

// This lane's columns of a warp's first chunk.
__device__ __forceinline__ int first_column(int block) {
  return (block * kLoraWarps + warp_index()) * kWarpColumns + lane_index() % 4 * 8;
}

// What a lane has of 16 rows of A and a chunk: of two rows.
template <typename T>
struct ChunkOfA {
  Vec<T, 8> low, high;

  __device__ __forceinline__ void load_chunk(const Lora<T>& p, const T* a, int tile, int column) {
    const int row = tile * kTileRank + lane_index() / 4;
    const T* from = a + static_cast<int64_t>(row) * p.columns + column;
    low = load_if(column < p.columns && row < p.rank, from);
    high = load_if(column < p.columns && row + 8 < p.rank, from + 8 * static_cast<int64_t>(p.columns));
  }
};

// Adds to two sums, of the halves of a chunk: neither mma waits for the other. Which columns are the first of an mma
// does not matter, as long as they are the same ones of A and of x.
template <typename T>
__device__ __forceinline__ void multiply_chunk(float (&sums)[2][4], const ChunkOfA<T>& a, const Vec<T, 8>& x) {
  const auto* low = reinterpret_cast<const uint32_t*>(&a.low.raw);
  const auto* high = reinterpret_cast<const uint32_t*>(&a.high.raw);
  const auto* given = reinterpret_cast<const uint32_t*>(&x.raw);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t left[4] = {low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
    const uint32_t right[2] = {given[2 * i], given[2 * i + 1]};
    multiply_add(sums[i], left, right, T{});
  }
}

// What a thread holds of an adapter: the first chunks of 16 rows of A, and 16 ranks of its rows of B. Where registers
// have no room for both, those of B come to the L2 cache first.
template <typename T, int kChunks, int kRows>
struct HeldAdapter {
  static constexpr bool kHasRoom = kChunks <= 2;
  const T *a, *b;
  ChunkOfA<T> chunks[kChunks];
  Vec<T, 8> rows[kRows][kHeldVecs];

  __device__ __forceinline__ void begin(const Lora<T>& p, const LoraTile& tile, int slot, int block) {
    a = matrix_a(p, slot, tile.part);
    b = p.b + (static_cast<int64_t>(slot) * p.num_rows + tile.first + static_cast<int>(threadIdx.x)) * p.rank;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) chunks[i].load_chunk(p, a, 0, first_column(block) + i * kChunkStride);
    if constexpr (kHasRoom)
      hold_rows(p, tile);
    else
      for (int r = 0; r < kRows; ++r)
        if (has_row(tile, r)) prefetch_to_l2(b + static_cast<int64_t>(r) * kLoraThreads * p.rank);
  }

  __device__ __forceinline__ void hold_rows(const Lora<T>& p, const LoraTile& tile) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kHeldVecs; ++i) rows[r][i] = load_of_b(p, tile, r, i);
  }

  __device__ __forceinline__ static bool has_row(const LoraTile& tile, int r) {
    return tile.first + static_cast<int>(threadIdx.x) + r * kLoraThreads < tile.last;
  }

  __device__ __forceinline__ Vec<T, 8> load_of_b(const Lora<T>& p, const LoraTile& tile, int r, int vec) const {
    return load_if(has_row(tile, r) && vec * 8 < p.rank, b + static_cast<int64_t>(r) * kLoraThreads * p.rank + vec * 8);
  }
};

// Sums of a warp's chunks for 8 tokens, of which this lane reads one, or none.
template <int kChunks, int kRows, typename T>
__device__ __forceinline__ void shrink_round(const Lora<T>& p, const HeldAdapter<T, kChunks, kRows>& held, const T* x,
                                             bool has_token, int block, uint32_t partials) {
  const int first = first_column(block), lane = lane_index(), tiles = rank_tiles(p);
  Vec<T, 8> given[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    given[i] = load_if(has_token && first + i * kChunkStride < p.columns, x + first + i * kChunkStride);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    float sums[2][4] = {};
    if (tile == 0) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) multiply_chunk(sums, held.chunks[i], given[i]);
    }
#pragma unroll 1
    for (int column = first + (tile == 0) * kChunks * kChunkStride; column - lane % 4 * 8 < p.columns;
         column += kChunkStride) {
      ChunkOfA<T> chunk;
      chunk.load_chunk(p, held.a, tile, column);
      multiply_chunk(sums, chunk, load_if(has_token && column < p.columns, x + column));
    }
    float* to = shared_floats(partials) + (tile * kLoraWarps + warp_index()) * kWarpFloats;
    to += lane % 4 * 2 * kPitch + lane / 4;
    to[0] = sums[0][0] + sums[1][0], to[kPitch] = sums[0][1] + sums[1][1];
    to[8] = sums[0][2] + sums[1][2], to[kPitch + 8] = sums[0][3] + sums[1][3];
  }
}

// Adds the warps' sums up and sends them, four a lane, from each warp to another block.
__device__ __forceinline__ void send_sums(const ClusterMemory& at, int tiles, int block) {
  const int lane = lane_index();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int from = tile * kLoraWarps * kWarpFloats + lane / 4 * kPitch + lane % 4 * 4;
    float4 total = {};
#pragma unroll
    for (int warp = 0; warp < kLoraWarps; ++warp) {
      const float4 four = load_four(at.partials + static_cast<uint32_t>((from + warp * kWarpFloats) * 4));
      total.x += four.x, total.y += four.y, total.z += four.z, total.w += four.w;
    }
    const int to = (tile * kSegments + block) * kTileSums + lane * 4;
    send_to_peer(at.received + static_cast<uint32_t>(to * 4), total, at.sent, static_cast<uint32_t>(warp_index()));
  }
}

// Adds the blocks' sums up, as [token][rank].
__device__ __forceinline__ void add_received(const ClusterMemory& at, int tiles) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < tiles * kTileSums; i += kLoraThreads) {
    const int tile = i / kTileSums, place = i % kTileSums;
    const float* from = shared_floats(at.received) + tile * kSegments * kTileSums + place;
    float total = 0.0f;
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) total += from[segment * kTileSums];
    shared_floats(at.totals)[(place / kTileRank * tiles + tile) * kTileRank + place % kTileRank] = total;
  }
}

// What a thread reads and writes of up to 4 tokens: its own outputs.
template <typename T, int kRows>
struct Outputs {
  T values[kRows][kHalfRound];
  int tokens[kHalfRound], count;

  // From this token of the group on.
  __device__ __forceinline__ void find(const TokenGroup& group, int first) {
    count = min(kHalfRound, group.count - first);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) tokens[t] = __shfl_sync(kAllLanes, group.token, (first + t) % 32);
  }

  __device__ __forceinline__ void load_given(const Lora<T>& p, const LoraTile& tile) {
    const int first = tile.first + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) {
      const T* from = p.y + static_cast<int64_t>(tokens[t]) * p.y_token + first;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        values[r][t] = t < count && first + r * kLoraThreads < tile.last ? from[r * kLoraThreads] : T{};
    }
  }

  __device__ __forceinline__ void write(const Lora<T>& p, const LoraTile& tile) const {
    const int first = tile.first + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) {
      T* to = p.out + static_cast<int64_t>(tokens[t]) * p.num_rows + first;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (t < count && first + r * kLoraThreads < tile.last) to[r * kLoraThreads] = values[r][t];
    }
  }
};

template <int kRows, typename T>
__device__ __forceinline__ void add_vec(float (&sums)[kRows][kHalfRound], const Vec<T, 8> (&rows)[kRows],
                                        uint32_t totals, int token_bytes, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float weights[kRows][8];
#pragma unroll
    for (int r = 0; r < kRows; ++r) to_floats(weights[r], rows[r]);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) {
      if (t >= count) break;
      const float4 four = load_four(totals + static_cast<uint32_t>(t * token_bytes + half * 16));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r][t] = fmaf(weights[r][half * 4], four.x, sums[r][t]);
        sums[r][t] = fmaf(weights[r][half * 4 + 1], four.y, sums[r][t]);
        sums[r][t] = fmaf(weights[r][half * 4 + 2], four.z, sums[r][t]);
        sums[r][t] = fmaf(weights[r][half * 4 + 3], four.w, sums[r][t]);
      }
    }
  }
}

// Adds what an adapter comes to for up to 4 tokens, whose totals begin here.
template <int kChunks, int kRows, typename T>
__device__ __forceinline__ void expand_tokens(const Lora<T>& p, const LoraTile& tile,
                                              const HeldAdapter<T, kChunks, kRows>& held, float scale, uint32_t totals,
                                              Outputs<T, kRows>& outputs) {
  const int token_bytes = rank_tiles(p) * kTileRank * 4, vecs = p.rank / 8;
  float sums[kRows][kHalfRound] = {};
  Vec<T, 8> rows[kRows];
#pragma unroll
  for (int i = 0; i < kHeldVecs; ++i) {
    if (i >= vecs) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = held.rows[r][i];
      keep_packed(rows[r]);
    }
    add_vec<kRows>(sums, rows, totals + static_cast<uint32_t>(i * 32), token_bytes, outputs.count);
  }
#pragma unroll 1
  for (int i = kHeldVecs; i < vecs; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = held.load_of_b(p, tile, r, i);
    add_vec<kRows>(sums, rows, totals + static_cast<uint32_t>(i * 32), token_bytes, outputs.count);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t)
      outputs.values[r][t] = static_cast<T>(fmaf(scale, sums[r][t], static_cast<float>(outputs.values[r][t])));
}

// Up to 8 tokens of a group, from this one on. All blocks of a cluster call it together.
template <int kChunks, int kRows, typename T>
__device__ __forceinline__ void add_round(const Lora<T>& p, const LoraTile& tile, const TokenGroup& group, int first,
                                          HeldAdapter<T, kChunks, kRows>& held, float scale, int block,
                                          const ClusterMemory& at, uint32_t parity) {
  const int tiles = rank_tiles(p), own = first + lane_index() / 4;
  if (threadIdx.x == 0) arrive_expecting(at.sent, static_cast<uint32_t>(tiles * kSegments * kTileSums * 4));
  arrive_at_cluster();  // nothing of a round before is read any more
  const int token = __shfl_sync(kAllLanes, group.token, own % 32);
  shrink_round(p, held, p.x + static_cast<int64_t>(token) * p.x_token, own < group.count, block, at.partials);
  __syncthreads();
  wait_for_cluster();
  send_sums(at, tiles, block);
  Outputs<T, kRows> outputs;
  outputs.find(group, first);
  outputs.load_given(p, tile);  // meanwhile
  if constexpr (!HeldAdapter<T, kChunks, kRows>::kHasRoom) held.hold_rows(p, tile);
  wait_barrier(at.sent, parity);
  add_received(at, tiles);
  __syncthreads();
  expand_tokens(p, tile, held, scale, at.totals, outputs);
  outputs.write(p, tile);
  if (first + kHalfRound >= group.count) return;
  outputs.find(group, first + kHalfRound);
  outputs.load_given(p, tile);
  expand_tokens(p, tile, held, scale, at.totals + static_cast<uint32_t>(kHalfRound * tiles * kTileRank * 4), outputs);
  outputs.write(p, tile);
}

template <int kRows, typename T>
__device__ __forceinline__ void copy_group(const Lora<T>& p, const LoraTile& tile, const TokenGroup& group) {
#pragma unroll 1
  for (int first = 0; first < group.count; first += kHalfRound) {
    Outputs<T, kRows> outputs;
    outputs.find(group, first);
    outputs.load_given(p, tile);
    outputs.write(p, tile);
  }
}

// Blocks that a processor has registers for. Those that hold little leave room for a GEMM's, and find it beside them.
template <int kChunks, int kRows>
constexpr int kBlocksAtOnce = kChunks * kRows == 2 ? 3 : 2;

// Slots, scales, A and B are read before the kernel ahead has ended: no kernel of a CUDA graph that has this one may
// write them.
template <typename T, int kChunks, int kRows>
__global__ void __launch_bounds__(kLoraThreads, kBlocksAtOnce<kChunks, kRows>)
    lora_cluster_kernel(const __grid_constant__ Lora<T> p) {
  extern __shared__ uint8_t shared[];
  start_successor();
  const ClusterMemory at(shared_address(shared), rank_tiles(p));
  const auto place = static_cast<int>(blockIdx.x) / kSegments, block = static_cast<int>(blockIdx.x) % kSegments;
  const LoraTile tile = tile_of<kSegments>(p, place % p.num_tiles, block);
  const TokenWindow window = window_of(p, place / p.num_tiles / p.num_groups * kWindow);
  const int groups = __popc(window.leaders), first = place / p.num_tiles % p.num_groups;
  if (first >= groups) return;
  if (threadIdx.x == 0) {
    init_barrier(at.sent, 1);
    publish_barriers();
  }
  uint32_t parity = 0;
  for (int index = first; index < groups; index += p.num_groups) {
    const TokenGroup group = group_of(window, index);
    const float scale = group.slot < 0 ? 0.0f : p.scales[group.slot * p.num_parts + tile.part];
    HeldAdapter<T, kChunks, kRows> held;
    if (group.slot >= 0) held.begin(p, tile, group.slot, block);
    if (index == first) wait_for_predecessor();
    if (scale == 0.0f) copy_group<kRows>(p, tile, group);
    for (int token = 0; scale != 0.0f && token < group.count; token += kRound, parity ^= 1)
      add_round(p, tile, group, token, held, scale, block, at, parity);
  }
}

// How the kernel divides the work: rows of B that a thread has, and clusters for the slots of a window.
template <typename T>
int divide_by_clusters(Lora<T>& p, int num_slots, int most_rows) {
  const int windows = (p.tokens + kWindow - 1) / kWindow;
  p.num_groups = p.tokens > kManyTokens ? 1 : min(min(p.tokens, kWindow), num_slots + 1);
  int rows = 1;
  p.set_block_rows(kLoraThreads);
  while (rows < most_rows && windows * min(p.num_groups, num_slots) * p.num_tiles * kSegments > kWave) {
    const int before = p.num_tiles;
    p.set_block_rows(2 * rows * kLoraThreads);
    if (p.num_tiles == before) break;
    rows *= 2;
  }
  p.set_block_rows(rows * kLoraThreads);
  return rows;
}

}  // namespace lamina
