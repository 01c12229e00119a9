// What the parts of the streaming GEMM share: sizes, what a block computes, and where it keeps things.
#pragma once

#include <cstdint>

namespace lamina {

constexpr int kRows = 64, kColumns = 64;  // of a tile of the weights: 128 bytes a row
constexpr int kMaxStages = 24;
constexpr int kTileBytes = kRows * kColumns * 2;
constexpr int kWarp = 32, kRun = 8;  // threads; neighbouring results that a thread makes at once: 16 bytes

template <typename T>
struct Linear {
  const T* bias;  // [n] or null
  T* out;         // [tokens, width]: width n, or n / 2 where kGated
  int tokens, n, k, share, split, stages;
  int copied;  // rows of x that a copy brings: no more than there are, since what lies outside is slower than any row
};

template <int kGroups, int kTokens>
struct Shape {
  static constexpr int kTokenRows = kTokens;
  static constexpr int kBlockRows = kGroups * kRows, kThreads = kGroups * 128;     // threads that multiply
  static constexpr int kTiles = kTokens <= 32 ? 2 : 1, kStep = kTiles * kColumns;  // columns taken at once
  static constexpr int kXBytes = kTokens * kColumns * 2;                           // of 64 columns
  static constexpr int kStageBytes = kTiles * (kGroups * kTileBytes + kXBytes);
  static constexpr int kPitch = kBlockRows + 4;  // floats; so that a warp's sums fall into different banks
  static constexpr int kSumBytes = kPitch * kTokens * 4;
  using Sums = float[kTokens / 2];
  // Few sums are sent to the blocks that add them up; many are fetched by them, which waits for all memory.
  static constexpr bool kSends = kTokens <= 32;
  static constexpr int kSentBytes = kSends ? kBlockRows * kTokens * 4 : 0;
  static constexpr int bytes(int stages) {
    const int tiles = stages * kStageBytes;
    return (tiles > kSumBytes ? tiles : kSumBytes) + kSentBytes + 1024;  // 1024: to align the tiles
  }
};

// What a block computes.
struct Work {
  int tile, token;  // which rows of the weights; the first row of x
  int begin, end;   // steps
  int part, share;  // of the x that blocks of a cluster hand each other
  int rank, split;  // of the blocks that share out the columns
};

// Where a block keeps things in shared memory, and how many tiles there are.
struct Places {
  uint32_t tiles, full, empty, sent;
  int stages;
};

}  // namespace lamina
