// The split-K GEMM: tile shapes, shared-memory layout, and what a block computes.
#pragma once

#include <cstdint>

namespace lamina {

constexpr int kRows = 64, kRowBytes = 128;  // of a tile of the weights
constexpr int kMaxStages = 24;
constexpr int kTileBytes = kRows * kRowBytes;
constexpr int kWarp = 32, kRun = 8;  // threads; neighbouring results that a thread stores at once: 16 bytes

// Columns of a tile.
template <typename In>
constexpr int kTileColumns = kRowBytes / static_cast<int>(sizeof(In));

// Scales of the operands, where those have any: scaled_gemm.cuh has those of one byte.
template <typename In>
struct Scales {};
template <typename In>
constexpr bool kIsScaled = sizeof(In) == 1;

// Low-rank adapters that the kernel behind will read: of each slot so many bytes of A and of B, each in one piece.
struct AdaptersBehind {
  const uint8_t *a, *b;
  const int32_t* slots;  // of each token; null: there are none
  int64_t a_bytes, b_bytes;
};

// What is multiplied, of type In, comes as tensor maps.
template <typename In, typename Out = In>
struct Linear : Scales<In> {
  const Out* bias;  // [n] or null
  Out* out;         // [tokens, width]: width n, or n / 2 where kGated
  int tokens, n, k, multicast, split_k, stages;
  int pace;  // split-K kernel: the first weights are loaded over as many kPaceClocks, for the sake of the kernel ahead
  // Persistent kernel: whether split-K is of every tile, not of the last wave alone, so that sums do not depend on
  // where a tile lies.
  bool splits_all;
  int box_rows;     // rows of x in a TMA box: no more than there are, since rows out of bounds are slower than any
  bool promises_x;  // the kernel behind begins only when x is complete (pdl.cuh)
  AdaptersBehind behind;
};

constexpr uint32_t kPaceClocks = 2048;

template <typename Element, int kWarpgroups, int kTokens>
struct SplitKShape {
  using In = Element;
  static constexpr int kTokenRows = kTokens;
  static constexpr int kBlockRows = kWarpgroups * kRows, kThreads = kWarpgroups * 128;     // consumer threads
  static constexpr int kTiles = kTokens <= 32 ? 2 : 1, kStep = kTiles * kTileColumns<In>;  // columns of K a stage
  static constexpr int kXBytes = kTokens * kRowBytes;                                      // of a tile
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
