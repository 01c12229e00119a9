// What the parts of the GEMM as a persistent kernel share: sizes, and the work of a block.
#pragma once

#include <cstdint>

#include "ring.cuh"
#include "stream_shape.cuh"

namespace lamina {

constexpr int kSharedBytes = 225 << 10;  // for tiles, of 227 KB

template <int kGroupCount, int kTokens, int kShare, int kSplit>
struct ResidentShape {
  static constexpr int kGroups = kGroupCount, kTokenRows = kTokens, kParts = kShare, kRanks = kSplit;
  static constexpr int kCluster = kShare * kSplit;  // blocks
  // Whether what is left may be shared in threes of strips: two blocks take one each, and half of the third.
  static constexpr bool kNarrows = kGroups == 2 && kShare * kSplit == 2 && (kShare == 2 || kTokens > 128);
  static constexpr int kBlockRows = kGroups * kRows, kThreads = kGroups * 128;  // threads that multiply
  static constexpr int kAllThreads = kThreads + 128;  // registers move between whole warpgroups
  static constexpr bool kMovesRegisters = kGroups > 1;
  static constexpr int kProducerRegisters = 40, kRowRegisters = 232;
  static constexpr int kWeightBytes = kGroups * kTileBytes, kXBytes = kTokens * kColumns * 2;
  static constexpr int kStageBytes = kWeightBytes + kXBytes, kStages = kSharedBytes / kStageBytes;
  static constexpr int kBarriers = 2 * kStages + 2;
  static constexpr int kBytes = kStages * kStageBytes + kBarriers * 8 + 1024;  // 1024: to align the tiles
  // Of a tile that a cluster shares, each block adds up the sums of as many rows of x; others send theirs in units of
  // 16 bytes a thread, for which stages of the ring are taken.
  static constexpr int kSums = kTokens / 2, kOwnSums = kSums / kSplit;  // a thread
  static constexpr int kUnitBytes = kThreads * 16, kUnitsInStage = kStageBytes / kUnitBytes;
  static constexpr int kUnitsOfRank = kOwnSums / 4, kUnits = (kSplit - 1) * kUnitsOfRank;
  static constexpr int kSumStages = (kUnits + kUnitsInStage - 1) / kUnitsInStage;
  static_assert(kTokens % (8 * kShare) == 0 && kTokens % (8 * kSplit) == 0 && kStages >= 2 && kSumStages <= kStages &&
                kStages <= kMaxStages);
  __device__ __forceinline__ static int sum_bytes(int stage, bool is_narrow) {
    const int before = stage * kUnitsInStage, units = min(kUnits - before, kUnitsInStage);
    if (!kNarrows || !is_narrow) return units * kUnitBytes;
    return (units + max(min(kUnits / 2 - before, kUnitsInStage), 0)) * (kUnitBytes / 2);
  }
};

// Rows of x that each part of a cluster copies for a section: sections are as many as need be, and even.
template <typename S>
int rows_to_copy(int tokens) {
  const int sections = (tokens + S::kTokenRows - 1) / S::kTokenRows, blocks = sections * S::kParts * 8;
  return (tokens + blocks - 1) / blocks * 8;
}

// What a block takes at once: strips of 64 weight rows, one for each group of warps, and steps of 64 columns.
struct Item {
  int first, second;  // strips; of further groups those that follow the second
  int token;          // the first row of x
  int begin, count;   // steps
  bool is_shared;     // the other ranks of the cluster take the other columns
  bool is_narrow;     // of the second strip it takes half of the rows of x, a neighbour the others
  int half;           // which half
};

// The items of a block, the same number for all blocks of a cluster: first tiles of its own, as long as there is one
// for most blocks, then what is left. Of that the ranks of a cluster share the columns; and two neighbours, parts of a
// cluster or clusters, three strips, the middle one by rows of x, where that is enough. Where an item begins behind the
// end, zeros arrive in its place.
template <typename S>
class Items {
 public:
  __device__ __forceinline__ Items(int n, int k, int tokens, int section)
      : strips_(ceil_of(n, kRows)),
        steps_(ceil_of(k, kColumns)),
        section_(section),
        sections_(ceil_of(tokens, section)),
        clusters_(static_cast<int>(gridDim.x) / S::kCluster),
        cluster_(static_cast<int>(blockIdx.x) / S::kCluster),
        rank_(static_cast<int>(blockIdx.x) % S::kCluster / S::kParts),
        part_(static_cast<int>(blockIdx.x) % S::kParts),
        tiles_(ceil_of(strips_, S::kParts * S::kGroups) * sections_) {
    const int slots = clusters_ * S::kRanks;
    whole_ = tiles_ / slots;
    const int rest = tiles_ - whole_ * slots;
    if constexpr (S::kNarrows) {
      const int strips = strips_ - first_left();
      is_narrow_ = sections_ == 1 && strips > 0 && strips <= clusters_ * S::kParts / 2 * 3;
    }
    if (!is_narrow_ && ceil_of(rest, clusters_) == S::kRanks) ++whole_;
  }

  // The item after so many others; whether there is one.
  __device__ __forceinline__ bool find(int index, Item& item) const {
    const int slots = clusters_ * S::kRanks;
    if (index < whole_) {
      item = tile(index * slots + cluster_ * S::kRanks + rank_);
      item.begin = 0, item.count = steps_;
      return true;
    }
    const int from = whole_ * slots + (index - whole_) * clusters_ + cluster_;
    item = tile(from);
    item.count = ceil_of(steps_, S::kRanks), item.begin = rank_ * item.count, item.is_shared = S::kRanks > 1;
    if constexpr (S::kNarrows) {
      if (is_narrow_) {
        const int neighbour = cluster_ * S::kParts + part_, strip = first_left() + neighbour / 2 * 3;
        item.half = neighbour % 2, item.first = strip + 2 * item.half, item.second = strip + 1, item.is_narrow = true;
        return index == whole_;
      }
    }
    return from < tiles_;
  }

 private:
  __device__ __forceinline__ static int ceil_of(int count, int size) { return (count + size - 1) / size; }

  __device__ __forceinline__ Item tile(int index) const {
    const int first = (index / sections_ * S::kParts + part_) * S::kGroups;
    return {first, first + 1, index % sections_ * section_, 0, 0, false, false, 0};
  }

  // The first strip that no block has alone.
  __device__ __forceinline__ int first_left() const { return whole_ * clusters_ * S::kCluster * S::kGroups; }

  const int strips_, steps_, section_, sections_, clusters_, cluster_, rank_, part_, tiles_;
  int whole_;
  bool is_narrow_ = false;
};

// Where a block keeps things in shared memory: the stages of the ring, and barriers.
struct RingPlaces {
  uint32_t tiles, full, empty;
  uint32_t ready, summed;  // every other block of the cluster has taken stages for sums; those in this one were added
};

}  // namespace lamina
