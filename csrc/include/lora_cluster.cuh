// Low-rank adapters in 16-bit types on GPUs with clusters: what a cluster computes of A by x.
//
// A cluster has the tokens of a window with one slot, and some outputs of one part, or the same ones of two. Its warps
// load what they read of A and B before the projection ahead has ended. Then each warp multiplies chunks of the columns
// for 8 tokens on tensor cores, in float32; the blocks send their sums to each other, and add them up in the order of
// the blocks. A token's bits depend on its columns and rank alone.
#pragma once

#include "cuda_mma.cuh"
#include "hopper.cuh"
#include "lora_shape.cuh"
#include "vec.cuh"

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

// Tiles of 16 rows of A, of as many parts as a cluster has.
template <int kParts, typename T>
__host__ __device__ int rank_tiles(const Lora<T>& p) {
  return (kParts * p.rank + kTileRank - 1) / kTileRank;
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
  unsigned same, leaders;  // lanes with this lane's slot; the first lane of each group
};

// Groups are of up to kMost tokens with one slot.
template <int kMost = kWindow, typename T>
__device__ __forceinline__ TokenWindow window_of(const Lora<T>& p, int first) {
  const int lane = lane_index();
  const bool exists = first + lane < p.tokens;
  const int slot = exists ? max(p.slots[first + lane], -1) : -2;
  const unsigned same = __match_any_sync(kAllLanes, slot);
  const bool leads = exists && __popc(same & ((1u << lane) - 1)) % kMost == 0;
  return {first, slot, same, __ballot_sync(kAllLanes, leads)};
}

// Tokens of a window with one slot.
struct TokenGroup {
  int slot, count, token;  // token: of lane i the i-th
};

template <int kMost = kWindow>
__device__ __forceinline__ TokenGroup group_of(const TokenWindow& window, int index) {
  const int leader = nth_bit(window.leaders, index);
  const unsigned same = __shfl_sync(kAllLanes, window.same, leader) & (~0u << leader);
  const int slot = __shfl_sync(kAllLanes, window.slot, leader);
  return {slot, min(__popc(same), kMost), window.first + nth_bit(same, lane_index())};
}

// Eight neighbours, or zeros.
template <typename T>
__device__ __forceinline__ Vec<T, 8> load_if(bool exists, const T* from) {
  Vec<T, 8> vec = {};
  if (exists) vec = load<8>(from);
  return vec;
}

// The same of what the kernel ahead of a projection has written, while that still runs.
template <typename T>
__device__ __forceinline__ Vec<T, 8> load_early_if(bool exists, const T* from) {
  Vec<T, 8> vec = {};
  if (exists) vec = load_from_l2<8>(from);
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

  __device__ __forceinline__ void load_chunk(const Lora<T>& p, const T* a, int num_ranks, int tile, int column) {
    const int row = tile * kTileRank + lane_index() / 4;
    const T* from = a + static_cast<int64_t>(row) * p.columns + column;
    low = load_if(column < p.columns && row < num_ranks, from);
    high = load_if(column < p.columns && row + 8 < num_ranks, from + 8 * static_cast<int64_t>(p.columns));
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

// What a thread holds of A: the first chunks of 16 rows a part.
template <typename T, int kChunks, int kParts>
struct HeldChunks {
  const T* a;
  ChunkOfA<T> chunks[kParts][kChunks];

  __device__ __forceinline__ void load_chunks(const Lora<T>& p, const LoraTile& tile, int slot, int block) {
    a = matrix_a(p, slot, tile.part);
#pragma unroll
    for (int tile_of_a = 0; tile_of_a < kParts; ++tile_of_a)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        chunks[tile_of_a][i].load_chunk(p, a, kParts * p.rank, tile_of_a, first_column(block) + i * kChunkStride);
  }
};

// What a thread holds of an adapter: of A, and 16 ranks of its rows of B. Where registers have no room for both, those
// of B come to the L2 cache first.
template <typename T, int kChunks, int kRows, int kParts>
struct HeldAdapter : HeldChunks<T, kChunks, kParts> {
  static constexpr bool kHasRoom = kChunks <= 2;
  const T* b;
  Vec<T, 8> rows[kParts][kRows][kHeldVecs];

  __device__ __forceinline__ void begin(const Lora<T>& p, const LoraTile& tile, int slot, int block) {
    b = p.b + (static_cast<int64_t>(slot) * p.num_rows + tile.first + static_cast<int>(threadIdx.x)) * p.rank;
    this->load_chunks(p, tile, slot, block);
    if constexpr (kHasRoom)
      hold_rows(p, tile);
    else
      prefetch_rows_of_b(p, tile);
  }

  __device__ __forceinline__ void prefetch_rows_of_b(const Lora<T>& p, const LoraTile& tile) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (has_row(tile, r)) prefetch_to_l2(row_of_b(p, part, r));
  }

  __device__ __forceinline__ void hold_rows(const Lora<T>& p, const LoraTile& tile) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < kHeldVecs; ++i) rows[part][r][i] = load_of_b(p, tile, part, r, i);
  }

  __device__ __forceinline__ static bool has_row(const LoraTile& tile, int r) {
    return tile.first + static_cast<int>(threadIdx.x) + r * kLoraThreads < tile.last;
  }

  __device__ __forceinline__ const T* row_of_b(const Lora<T>& p, int part, int r) const {
    return b + (static_cast<int64_t>(part) * p.rows[0] + r * kLoraThreads) * p.rank;
  }

  __device__ __forceinline__ Vec<T, 8> load_of_b(const Lora<T>& p, const LoraTile& tile, int part, int r,
                                                 int vec) const {
    return load_if(has_row(tile, r) && vec * 8 < p.rank, row_of_b(p, part, r) + vec * 8);
  }
};

// The sums of 16 rows of A from this column on, behind those that are held, to where the warp keeps its own.
template <int kParts, typename T>
__device__ __forceinline__ void finish_tile(const Lora<T>& p, const T* a, const T* x, bool has_token, int tile,
                                            int column, float (&sums)[2][4], uint32_t partials) {
  const int lane = lane_index();
#pragma unroll 1
  for (; column - lane % 4 * 8 < p.columns; column += kChunkStride) {
    ChunkOfA<T> chunk;
    chunk.load_chunk(p, a, kParts * p.rank, tile, column);
    multiply_chunk(sums, chunk, load_early_if(has_token && column < p.columns, x + column));
  }
  float* to = shared_floats(partials) + (tile * kLoraWarps + warp_index()) * kWarpFloats;
  to += lane % 4 * 2 * kPitch + lane / 4;
  to[0] = sums[0][0] + sums[1][0], to[kPitch] = sums[0][1] + sums[1][1];
  to[8] = sums[0][2] + sums[1][2], to[kPitch + 8] = sums[0][3] + sums[1][3];
}

// Sums of a warp's chunks for 8 tokens, of which this lane reads one, or none.
template <typename T, int kChunks, int kParts>
__device__ __forceinline__ void shrink_round(const Lora<T>& p, const HeldChunks<T, kChunks, kParts>& held, const T* x,
                                             bool has_token, int block, uint32_t partials) {
  const int first = first_column(block), tiles = rank_tiles<kParts>(p);
  Vec<T, 8> given[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    given[i] = load_early_if(has_token && first + i * kChunkStride < p.columns, x + first + i * kChunkStride);
#pragma unroll
  for (int tile = 0; tile < kParts; ++tile) {
    if (tile >= tiles) break;
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) multiply_chunk(sums, held.chunks[tile][i], given[i]);
    finish_tile<kParts>(p, held.a, x, has_token, tile, first + kChunks * kChunkStride, sums, partials);
  }
#pragma unroll 1
  for (int tile = kParts; tile < tiles; ++tile) {
    float sums[2][4] = {};
    finish_tile<kParts>(p, held.a, x, has_token, tile, first, sums, partials);
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

}  // namespace lamina
