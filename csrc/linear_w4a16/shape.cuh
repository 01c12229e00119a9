// The GEMM of weights of four bits, or of eight: its arguments, tile shapes and shared-memory layout.
#pragma once

#include "split_k_shape.cuh"

namespace lamina {

constexpr int kNibbleColumns = 64;     // of a tile of 64 rows: four steps of WGMMA
constexpr int kPieceBytes = 2048;      // 16 for each lane of a warpgroup
constexpr int kLeastGroup = 32;        // columns with one scale
constexpr int kGroupElements = kRows;  // scales of a tile and group, in one piece

// Weights, scales and zero points are shuffled: custom_ops/linear_w4a16/layout.py.
template <typename T>
struct LinearW4A16 : Linear<T> {
  const uint8_t* weight;    // tiles of 64 by 64 [n / 64, k / 64], pieces of each one after another
  const T* scale;           // [n / 64, groups, 64]
  const T* zero;            // the same, or null
  int groups, group_shift;  // a group is kLeastGroup << group_shift columns
  int scale_bytes;          // of one stage and warpgroup, without zero points
  bool paces;               // whether the first weights are loaded at a pace, for the sake of the kernel ahead
};

// How a lane gets scales: any groups, with zero points or without; or of groups of 128 columns without zero points,
// which costs a fifth of the instructions less, as nothing is left to be found out at run time.
enum class Groups { kAny, kPlain128 };
constexpr int kPlainShift = 2;  // 32 << 2 columns

// Where kByWarps, each warp multiplies its 16 rows by mma.sync, else a warpgroup its 64 by WGMMA.
template <int kWarpgroups, int kTokens, bool kByWarpsAlone = false, int kBitsOfOne = 4, Groups kGroups = Groups::kAny>
struct NibbleShape {
  static constexpr bool kIsPlain = kGroups == Groups::kPlain128;
  static constexpr int kBits = kBitsOfOne;
  static constexpr int kPieces = kBits / 4;  // of a tile of weights
  static constexpr int kWeightBytes = kPieces * kPieceBytes;
  static constexpr bool kByWarps = kByWarpsAlone;
  static constexpr int kTokenRows = kTokens;
  static constexpr int kBlockRows = kWarpgroups * kRows, kThreads = kWarpgroups * 128;  // consumer threads
  static constexpr int kTiles = kTokens <= 16 && kBits == 4 ? 4 : 2;                    // of a row of tiles, a stage
  static constexpr int kStep = kTiles * kNibbleColumns;                                 // columns of K a stage
  // Whether weights of the next stage are loaded while this one's are used: registers must have room.
  static constexpr bool kLoadsAhead = kBits == 4 || kTokens < 64;
  static constexpr int kResident = kTokens <= 16 ? 3 : 2;       // blocks a processor for which registers are to suffice
  static constexpr int kXBytes = kTokens * kNibbleColumns * 2;  // of a tile's columns
  static constexpr int kStageBytes = kTiles * (kWarpgroups * kWeightBytes + kXBytes);
  static constexpr int kPitch = kBlockRows + 4;  // floats; padded, so that a warp's sums fall into different banks
  static constexpr int kSumBytes = kPitch * kTokens * 4;
  using Sums = float[kTokens / 2];
  static constexpr bool kSends = kTokens <= 32;  // as in SplitKShape
  static constexpr int kSentBytes = kSends ? kBlockRows * kTokens * 4 : 0;
  static constexpr int kBarrierBytes = 8 * (2 * kMaxStages + 1) + 56;  // a multiple of 64

  // Scales of one stage and warpgroup, without zero points.
  static constexpr int scale_bytes(int group_shift) {
    const int groups = group_shift < 30 ? kStep / kLeastGroup >> group_shift : 0;
    return (groups > 1 ? groups : 1) * kGroupElements * 2;
  }
  // custom_ops/linear_w4a16/_cuda.py counts the same.
  __host__ __device__ static constexpr int bytes(int stages, int scale_bytes, bool has_zero) {
    const int tiles = stages * (kStageBytes + kWarpgroups * scale_bytes * (has_zero ? 2 : 1));
    return (tiles > kSumBytes ? tiles : kSumBytes) + kSentBytes + kBarrierBytes + 1024;  // 1024: to align the tiles
  }
};

}  // namespace lamina
