// What the parts of the resident product share: sizes, and the work of a block.
#pragma once

#include <cstdint>

#include "stream_shape.cuh"

namespace lamina {

constexpr int kSharedBytes = 225 << 10;  // for tiles, of 227 KB

template <int kGroups, int kTokens, int kSplit>
struct ResidentShape {
  static constexpr int kTokenRows = kTokens, kRanks = kSplit;
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
  static_assert(kSplit > 1 && kTokens % (8 * kSplit) == 0 && kStages >= 2 && kSumStages <= kStages &&
                kStages <= kMaxStages);
  __device__ __forceinline__ static int sum_bytes(int stage) {
    return min(kUnits - stage * kUnitsInStage, kUnitsInStage) * kUnitBytes;
  }
};

// A tile of the weights, and the steps of 64 columns that a block takes of it.
struct Item {
  int tile, begin, count;
  bool is_shared;  // with the other blocks of the cluster
};

// The items of a block, the same number for all blocks of a cluster: first tiles of its own, as long as there is one
// for most blocks, then parts of tiles that the cluster shares. Where a tile or a part begins behind the end, zeros
// arrive in its place.
template <int kSplit>
class Items {
 public:
  __device__ __forceinline__ Items(int tiles, int steps)
      : tiles_(tiles), steps_(steps), clusters_(gridDim.x / kSplit), whole_(tiles / gridDim.x) {
    const int rest = tiles - whole_ * gridDim.x;
    if ((rest + clusters_ - 1) / clusters_ == kSplit) ++whole_;
  }

  // The item after so many others; whether there is one.
  __device__ __forceinline__ bool find(int index, Item& item) const {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    if (index < whole_) {
      item = {index * blocks + block, 0, steps_, false};
      return true;
    }
    const int part = (steps_ + kSplit - 1) / kSplit;
    item = {whole_ * blocks + (index - whole_) * clusters_ + block / kSplit, block % kSplit * part, part, true};
    return item.tile < tiles_;
  }

 private:
  int tiles_, steps_, clusters_, whole_;
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
