// What the parts of the resident product share: sizes, and the work of a block.
#pragma once

#include <cstdint>

#include "stream_shape.cuh"

namespace lamina {

constexpr int kSharedBytes = 225 << 10;  // for tiles, of 227 KB

template <int kGroupCount, int kTokens, int kShare, int kSplit>
struct ResidentShape {
  static constexpr int kGroups = kGroupCount, kTokenRows = kTokens, kParts = kShare, kRanks = kSplit;
  static constexpr int kCluster = kShare * kSplit;  // blocks
  static constexpr bool kNarrows = kGroups == 2 && kShare == 2 && kSplit == 1;
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
  __device__ __forceinline__ static int sum_bytes(int stage) {
    return min(kUnits - stage * kUnitsInStage, kUnitsInStage) * kUnitBytes;
  }
};

// What a block takes at once: strips of 64 weight rows, one for each group of warps, and steps of 64 columns.
struct Item {
  int first, second;  // strips; of further groups those that follow the second
  int token;          // the first row of x
  int begin, count;   // steps
  bool is_shared;     // the other ranks of the cluster take the other columns
  bool is_narrow;     // the second strip is that of the other part as well: each takes half of the rows of x
};

// The items of a block, the same number for all blocks of a cluster: first tiles of its own, as long as there is one
// for most blocks, then what is left. Of that the ranks of a cluster share a tile's columns; two parts share three
// strips, the middle one by rows of x, where that is enough. Where an item begins behind the end, zeros arrive in its
// place.
template <typename S>
class Items {
 public:
  __device__ __forceinline__ Items(int n, int k, int tokens)
      : strips_(ceil_of(n, kRows)),
        steps_(ceil_of(k, kColumns)),
        sections_(ceil_of(tokens, S::kTokenRows)),
        clusters_(static_cast<int>(gridDim.x) / S::kCluster),
        cluster_(static_cast<int>(blockIdx.x) / S::kCluster),
        rank_(static_cast<int>(blockIdx.x) % S::kCluster / S::kParts),
        part_(static_cast<int>(blockIdx.x) % S::kParts),
        tiles_(ceil_of(strips_, S::kParts * S::kGroups) * sections_) {
    const int slots = clusters_ * S::kRanks;
    whole_ = tiles_ / slots;
    const int rest = tiles_ - whole_ * slots;
    if constexpr (S::kNarrows) {
      const int strips = strips_ - whole_ * slots * 4;
      narrow_ = sections_ == 1 && strips > 0 && strips <= clusters_ * 3;
      if (rest > 0 && !narrow_) ++whole_;
    } else if (ceil_of(rest, clusters_) == S::kRanks) {
      ++whole_;
    }
  }

  // The item after so many others; whether there is one.
  __device__ __forceinline__ bool find(int index, Item& item) const {
    const int slots = clusters_ * S::kRanks;
    if (index < whole_) {
      item = tile(index * slots + cluster_ * S::kRanks + rank_);
      item.begin = 0, item.count = steps_;
      return true;
    }
    if constexpr (S::kNarrows) {
      const int strip = whole_ * slots * 4 + cluster_ * 3;
      item = {strip + 2 * part_, strip + 1, 0, 0, steps_, false, true};
      return narrow_ && index == whole_;
    }
    const int part = ceil_of(steps_, S::kRanks), from = whole_ * slots + (index - whole_) * clusters_ + cluster_;
    item = tile(from);
    item.begin = rank_ * part, item.count = part, item.is_shared = S::kRanks > 1;
    return from < tiles_;
  }

 private:
  __device__ __forceinline__ static int ceil_of(int count, int size) { return (count + size - 1) / size; }

  __device__ __forceinline__ Item tile(int index) const {
    const int first = (index / sections_ * S::kParts + part_) * S::kGroups;
    return {first, first + 1, index % sections_ * S::kTokenRows, 0, 0, false, false};
  }

  const int strips_, steps_, sections_, clusters_, cluster_, rank_, part_, tiles_;
  int whole_;
  bool narrow_ = false;
};

// Where a block keeps things in shared memory: the stages of the ring, and barriers.
struct RingPlaces {
  uint32_t tiles, full, empty;
  uint32_t ready, summed;  // every other block of the cluster has taken stages for sums; those in this one were added
};

// A position in the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace lamina
