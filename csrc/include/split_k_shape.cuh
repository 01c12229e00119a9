// The split-K GEMM: tile shapes, shared-memory layout, and what a block computes.
#pragma once

#include <cstdint>

namespace lamina {

constexpr int kRows = 64, kColumns = 64;  // of a tile of the weights: 128 bytes a row
constexpr int kMaxStages = 24;
constexpr int kTileBytes = kRows * kColumns * 2;
constexpr int kWarp = 32, kRun = 8;  // threads; neighbouring results that a thread stores at once: 16 bytes

template <typename T>
struct Linear {
  const T* bias;  // [n] or null
  T* out;         // [tokens, width]: width n, or n / 2 where kGated
  int tokens, n, k, multicast, split_k, stages;
  int box_rows;  // rows of x in a TMA box: no more than there are, since rows out of bounds are slower than any
};

template <int kWarpgroups, int kTokens>
struct SplitKShape {
  static constexpr int kTokenRows = kTokens;
  static constexpr int kBlockRows = kWarpgroups * kRows, kThreads = kWarpgroups * 128;  // consumer threads
  static constexpr int kTiles = kTokens <= 32 ? 2 : 1, kStep = kTiles * kColumns;       // columns of K a stage
  static constexpr int kXBytes = kTokens * kColumns * 2;                                // of 64 columns
  static constexpr int kStageBytes = kTiles * (kWarpgroups * kTileBytes + kXBytes);
  static constexpr int kPitch = kBlockRows + 4;  // floats; padded, so that a warp's sums fall into different banks
  static constexpr int kSumBytes = kPitch * kTokens * 4;
  using Sums = float[kTokens / 2];
  // Few partial sums are pushed to the rank that adds them up (st.async); many are pulled by it, behind a cluster
  // barrier.
  static constexpr bool kSends = kTokens <= 32;
  static constexpr int kSentBytes = kSends ? kBlockRows * kTokens * 4 : 0;
  static constexpr int bytes(int stages) {
    const int tiles = stages * kStageBytes;
    return (tiles > kSumBytes ? tiles : kSumBytes) + kSentBytes + 1024;  // 1024: to align the tiles
  }
};

// A tile of work.
struct SplitKTile {
  int tile, token;                // which rows of the weights; the first row of x
  int begin, end;                 // steps
  int multicast_rank, multicast;  // blocks of a cluster that share tiles of x by TMA multicast
  int rank, split_k;              // blocks of a cluster that divide the columns of K
};

// Shared-memory addresses of the pipeline's stages and barriers, and the number of stages.
struct SharedLayout {
  uint32_t tiles, full, empty, sent;
  int stages;
};

}  // namespace lamina
