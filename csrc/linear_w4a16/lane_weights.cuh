// What a lane has of the weights in shared memory, and what it makes of them.
#pragma once

#include "dequantize.cuh"
#include "hopper.cuh"
#include "shape.cuh"
#include "warpgroup.cuh"

namespace lamina {

// Shared memory: stages of tiles and x, the scales of each stage, sums that peers send, barriers.
struct NibbleLayout {
  uint32_t tiles, scales, received, full, empty, sent;
  int stages, scale_bytes;  // of one stage and warpgroup, without zero points
};

template <typename S, typename T>
__device__ __forceinline__ NibbleLayout find_layout(uint32_t begin, const LinearW4A16<T>& p) {
  const uint32_t sent_end = begin + S::bytes(p.stages, p.scale_bytes, p.zero != nullptr) - 1024 - S::kBarrierBytes;
  NibbleLayout at{};
  at.tiles = begin, at.scales = begin + p.stages * S::kStageBytes, at.received = sent_end - S::kSentBytes;
  at.full = sent_end, at.empty = sent_end + 8 * kMaxStages, at.sent = sent_end + 16 * kMaxStages;
  at.stages = p.stages, at.scale_bytes = p.scale_bytes;
  return at;
}

// A group's columns, as LinearW4A16 counts them, and whether there are zero points.
template <typename S, typename T>
__device__ __forceinline__ int shift_of(const LinearW4A16<T>& p) {
  return S::kIsPlain ? kPlainShift : p.group_shift;
}
template <typename S, typename T>
__device__ __forceinline__ bool has_zero_points(const LinearW4A16<T>& p) {
  return !S::kIsPlain && p.zero != nullptr;
}

// The group of a column.
template <typename S, typename T>
__device__ __forceinline__ int find_group(int column, const LinearW4A16<T>& p) {
  return static_cast<int>(static_cast<uint32_t>(column) / kLeastGroup >> shift_of<S>(p));
}

// Scales and zero points of a lane's rows, which lie at an offset.
__device__ __forceinline__ RowScales load_scales(uint32_t from, int scale_bytes, bool has_zero) {
  const uint32_t scales = load_word(from), zeros = has_zero ? load_word(from + scale_bytes) : 0;
  return {{both_low(scales), both_high(scales)}, {both_low(zeros), both_high(zeros)}};
}

// A lane's part of the tiles of a stage: 16 bytes of each piece.
template <typename S>
__device__ __forceinline__ void load_tiles(uint32_t (&words)[S::kTiles][4 * S::kPieces], uint32_t from) {
#pragma unroll
  for (int i = 0; i < S::kTiles * S::kPieces; ++i) {
    const uint4 piece = load_words(from + i * kPieceBytes);
    uint32_t* const to = words[i / S::kPieces] + i % S::kPieces * 4;
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
  }
}

// Where a lane finds its parts of the first stage: weights, scales, and its row of x in both halves of a tile's
// columns, whose 16-byte units are swizzled by the row.
struct LaneParts {
  uint32_t weights, scales, x[2], lane;
};

template <typename S>
__device__ __forceinline__ LaneParts find_parts(const NibbleLayout& at, int scale_bytes) {
  constexpr int kWarpgroups = S::kBlockRows / kRows;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so the compiler sees that it is uniform
  const uint32_t in_group = threadIdx.x % 128, lane = threadIdx.x % 32, row = lane % 8, unit = lane / 8;
  const uint32_t x = at.tiles + S::kTiles * kWarpgroups * S::kWeightBytes + row * kRowBytes;
  uint32_t parts[] = {at.tiles + group * S::kTiles * S::kWeightBytes + in_group * 16,
                      at.scales + group * scale_bytes + in_group / 4 * 4, x + ((unit ^ row) << 4),
                      x + (((4 + unit) ^ row) << 4), lane};
  pin(parts);  // or the compiler would find them again at every stage
  return {parts[0], parts[1], {parts[2], parts[3]}, parts[4]};
}

// A lane's part of the tiles of a stage, 16 bytes of each piece, and its scales where they are plain. Others are loaded
// as they are needed.
template <typename S, typename T>
struct LaneWeights {
  __device__ __forceinline__ LaneWeights(const NibbleLayout& at, const LinearW4A16<T>& p)
      : shift(shift_of<S>(p)),
        last_group(find_group<S>(p.k - 1, p)),
        zero_offset(has_zero_points<S>(p) ? at.scale_bytes : 0),
        scale_bytes(at.scale_bytes + zero_offset),
        parts(find_parts<S>(at, scale_bytes)) {}

  // Of the stage where a step's weights lie.
  __device__ __forceinline__ void load(int step, int stage) {
    load_tiles<S>(words, parts.weights + stage * S::kStageBytes);
#pragma unroll
    for (int i = 0; S::kIsPlain && i < S::kTiles / 2; ++i) plain_scales[i] = load_word(scales_at(4 * i, step, stage));
  }

  // The registers of tile i of the step whose weights are loaded, four for each 16 columns.
  __device__ __forceinline__ void dequantize_tile(uint32_t (&to)[16], int i, int step, int stage) {
    const bool is_pair_alike = shift >= 2;  // two tiles of a stage, of which the first is even, have one scale
    if (i % 2 == 0 || !is_pair_alike) take_scales(2 * i, step, stage);
    dequantize_columns(to, words[i]);
    dequantize_columns(to + 4, words[i] + S::kPieces);
    if (shift == 0) take_scales(2 * i + 1, step, stage);
    dequantize_columns(to + 8, words[i] + 2 * S::kPieces);
    dequantize_columns(to + 12, words[i] + 3 * S::kPieces);
  }

  int shift, last_group, zero_offset, scale_bytes;  // bytes of a stage and warpgroup: up to zero points, and of both
  LaneParts parts;
  uint32_t words[S::kTiles][4 * S::kPieces], plain_scales[S::kTiles / 2];
  RowScales rows;

 private:
  // A group as its stage counts them, and no further than the row's last.
  __device__ __forceinline__ uint32_t scales_at(int half_tile, int step, int stage) const {
    const int first = S::kIsPlain ? step * (S::kStep / (kLeastGroup << kPlainShift))
                                  : static_cast<int>(static_cast<uint32_t>(step * S::kStep) / kLeastGroup >> shift);
    const int group = half_tile == 0 ? 0 : min(half_tile >> shift, last_group - first);
    return parts.scales + stage * (S::kBlockRows / kRows) * scale_bytes + group * kGroupElements * 2;
  }

  __device__ __forceinline__ void take_scales(int half_tile, int step, int stage) {
    if constexpr (S::kIsPlain) {
      rows = find_plain_scales<T>(plain_scales[half_tile / 4]);
    } else {
      rows = load_scales(scales_at(half_tile, step, stage), zero_offset, zero_offset != 0);
    }
  }

  __device__ __forceinline__ void dequantize_columns(uint32_t* to, const uint32_t* from) const {
    if constexpr (S::kIsPlain)
      dequantize_plain<T>(to, *from, rows);
    else
      dequantize<S::kBits, T>(to, from, rows);
  }
};

// The factor that sums of plain weights lack.
template <typename S, typename T>
__device__ __forceinline__ void complete(typename S::Sums& sums) {
  if constexpr (S::kIsPlain && kPlainFactor<T> != 1.0f) {
#pragma unroll
    for (float& sum : sums) sum *= kPlainFactor<T>;
  }
}

}  // namespace lamina
