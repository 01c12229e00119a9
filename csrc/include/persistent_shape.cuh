// The persistent GEMM: tile shapes, shared-memory layout, and the static tile scheduler.
#pragma once

#include <cstdint>

#include "pipeline.cuh"
#include "split_k_shape.cuh"

namespace lamina {

constexpr int kSharedBytes = 225 << 10;  // for pipeline stages, of 227 KB
// Rows of x that all strips of weights are multiplied by before further ones are: the tiles that an H200 has at work at
// once then lie in a square, as many rows of weights as of x, so that the least of both comes to the L2 cache.
constexpr int kGroupTokens = 2048;

template <typename Element, int kNumWarpgroups, int kTokens, int kMulticastBlocks, int kSplits>
struct PersistentShape {
  using In = Element;
  static constexpr int kWarpgroups = kNumWarpgroups, kTokenRows = kTokens, kMulticast = kMulticastBlocks,
                       kSplitK = kSplits;
  static constexpr int kCluster = kMulticastBlocks * kSplits;  // blocks
  static constexpr int kGroupSections = kGroupTokens / kTokens;
  // Whether the last wave may be divided in threes of strips: two blocks take one each, and half of the third.
  static constexpr bool kNarrows =
      kWarpgroups == 2 && kMulticastBlocks * kSplits == 2 && (kMulticastBlocks == 2 || kTokens > 128);
  static constexpr int kBlockRows = kWarpgroups * kRows, kThreads = kWarpgroups * 128;  // threads that multiply
  static constexpr int kAllThreads = kThreads + 128;  // setmaxnreg is of whole warpgroups
  static constexpr bool kMovesRegisters = kWarpgroups > 1;
  static constexpr int kProducerRegisters = 40, kRowRegisters = 232;
  static constexpr int kWeightBytes = kWarpgroups * kTileBytes, kXBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes, kStages = kSharedBytes / kStageBytes;
  static constexpr int kBarriers = 2 * kStages + 2;
  static constexpr int kBytes = kStages * kStageBytes + kBarriers * 8 + 1024;  // 1024: to align the tiles
  // Of a split-K tile each rank adds up the partial sums of as many rows of x; the others send theirs in units of 16
  // bytes a thread, for which pipeline stages are taken.
  static constexpr int kSums = kTokens / 2, kOwnSums = kSums / kSplits;  // a thread
  static constexpr int kUnitBytes = kThreads * 16, kUnitsInStage = kStageBytes / kUnitBytes;
  static constexpr int kUnitsOfRank = kOwnSums / 4, kUnits = (kSplits - 1) * kUnitsOfRank;
  static constexpr int kSumStages = (kUnits + kUnitsInStage - 1) / kUnitsInStage;
  static_assert(kTokens % (8 * kMulticastBlocks) == 0 && kTokens % (8 * kSplits) == 0 && kStages >= 2 &&
                kSumStages <= kStages && kStages <= kMaxStages);
  __device__ __forceinline__ static int sum_bytes(int stage, bool is_narrow) {
    const int before = stage * kUnitsInStage, units = min(kUnits - before, kUnitsInStage);
    if (!kNarrows || !is_narrow) return units * kUnitBytes;
    return (units + max(min(kUnits / 2 - before, kUnitsInStage), 0)) * (kUnitBytes / 2);
  }
};

// Rows of x that each block of a multicast group loads for a section of x: as many sections as need be, of equal size.
template <typename S>
int rows_to_copy(int tokens) {
  const int sections = (tokens + S::kTokenRows - 1) / S::kTokenRows, blocks = sections * S::kMulticast * 8;
  return (tokens + blocks - 1) / blocks * 8;
}

// A tile of work: strips of 64 weight rows, one for each consumer warpgroup, by a section of x, over a range of K in
// steps of a tile's columns.
struct PersistentTile {
  int first, second;  // strips; further warpgroups take those that follow the second
  int token;          // the first row of x
  int begin, count;   // steps
  bool is_shared;     // split-K: the other ranks of the cluster take the other columns
  bool is_narrow;     // of the second strip it takes half of the rows of x, a neighbour the others
  int half;           // which half
};

// Static tile scheduler: gives each block its tiles, the same number for all blocks of a cluster. First whole tiles, as
// long as there is one for most blocks; then the last wave, by split-K over the ranks of a cluster, or three strips for
// two neighbouring blocks or clusters, the middle one divided by rows of x, where that is enough. A tile that begins
// behind the end is filled with zeros. With splits_all there is no whole tile before the last wave.
template <typename S>
class PersistentTileScheduler {
 public:
  __device__ __forceinline__ PersistentTileScheduler(int n, int k, int tokens, int section, bool splits_all)
      : strips_(ceil_of(n, kRows)),
        steps_(ceil_of(k, kTileColumns<typename S::In>)),
        section_(section),
        sections_(ceil_of(tokens, section)),
        clusters_(static_cast<int>(gridDim.x) / S::kCluster),
        cluster_(static_cast<int>(blockIdx.x) / S::kCluster),
        rank_(static_cast<int>(blockIdx.x) % S::kCluster / S::kMulticast),
        multicast_rank_(static_cast<int>(blockIdx.x) % S::kMulticast),
        tiles_(ceil_of(strips_, S::kMulticast * S::kWarpgroups) * sections_) {
    const int slots = clusters_ * S::kSplitK;
    splits_all = splits_all && S::kSplitK > 1;
    whole_ = splits_all ? 0 : tiles_ / slots;
    const int rest = tiles_ - whole_ * slots;
    if constexpr (S::kNarrows) {
      const int strips = strips_ - first_left();
      is_narrow_ = sections_ == 1 && strips > 0 && strips <= clusters_ * S::kMulticast / 2 * 3;
    }
    if (!is_narrow_ && !splits_all && ceil_of(rest, clusters_) == S::kSplitK) ++whole_;
  }

  // The tile after so many others; false where there is none.
  __device__ __forceinline__ bool find(int index, PersistentTile& work) const {
    const int slots = clusters_ * S::kSplitK;
    if (index < whole_) {
      work = tile(index * slots + cluster_ * S::kSplitK + rank_);
      work.begin = 0, work.count = steps_;
      return true;
    }
    const int from = whole_ * slots + (index - whole_) * clusters_ + cluster_;
    work = tile(from);
    work.count = ceil_of(steps_, S::kSplitK), work.begin = rank_ * work.count, work.is_shared = S::kSplitK > 1;
    if constexpr (S::kNarrows) {
      if (is_narrow_) {
        const int neighbour = cluster_ * S::kMulticast + multicast_rank_, strip = first_left() + neighbour / 2 * 3;
        work.half = neighbour % 2, work.first = strip + 2 * work.half, work.second = strip + 1, work.is_narrow = true;
        return index == whole_;
      }
    }
    return from < tiles_;
  }

 private:
  __device__ __forceinline__ static int ceil_of(int count, int size) { return (count + size - 1) / size; }

  // By groups of sections, in each strip by strip.
  __device__ __forceinline__ PersistentTile tile(int index) const {
    int before = 0, own = index, sections = sections_;
    if (sections_ > S::kGroupSections) {
      const int strips = tiles_ / sections_, last = (sections_ - 1) / S::kGroupSections;
      before = min(index / (strips * S::kGroupSections), last) * S::kGroupSections;
      own -= before * strips, sections = min(sections_ - before, S::kGroupSections);
    }
    const int first = (own / sections * S::kMulticast + multicast_rank_) * S::kWarpgroups;
    return {first, first + 1, (before + own % sections) * section_, 0, 0, false, false, 0};
  }

  // The first strip of the last wave.
  __device__ __forceinline__ int first_left() const { return whole_ * clusters_ * S::kCluster * S::kWarpgroups; }

  const int strips_, steps_, section_, sections_, clusters_, cluster_, rank_, multicast_rank_, tiles_;
  int whole_;
  bool is_narrow_ = false;
};

// Shared-memory addresses: the pipeline's stages, and barriers.
struct PersistentLayout {
  uint32_t tiles, full, empty;
  uint32_t ready, summed;  // all other ranks have taken stages for partial sums; those in this block were added
};

}  // namespace lamina
