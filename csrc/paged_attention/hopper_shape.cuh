// The kernel for Hopper: its parameters, its constants and its shared memory.
#pragma once

#include <type_traits>

#include "kernel.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"

namespace lamina {

// Named barriers (bar.sync), beside the mbarriers in shared memory.
enum NamedBarrier : int { kRowThreadsBarrier = 1, kTurnBarrier = 2 };

// Fixed splits (batch invariance): each sequence's keys are cut at multiples of `keys`, whoever computes them.
struct FixedSplits {
  int keys;
  int whole_keys;    // of decoding, sequences of more are divided among blocks, a split each
  int num_slots;     // of partial results, each of
  int partial_rows;  // rows
};

// The call, and the TMA tensor maps of its tensors.
template <typename T, typename Cached = T, bool kRotates = false>
struct HopperAttention {
  CUtensorMap query_map;           // head_dim, head of the group, key-value head, token
  CUtensorMap key_map, value_map;  // head_dim, key-value head, token of the block, block
  PagedAttention<T, Cached, kRotates> call;
  int32_t* tile_counter;        // units of work that were taken; zero before and after
  int block_mask, block_shift;  // a block holds block_mask + 1 = 2^block_shift keys
  FixedSplits fixed;            // where the shape has them
};

// The constants of the kernel for one head_dim. Keys and values in FP8 are converted on their way: TMA brings them as
// they are stored, producer warps write them as float16, and queries and probabilities are float16, too.
template <typename Element, typename CacheElement, int dim, bool fixed_splits = false>
struct HopperShape {
  using T = Element;
  using Cached = CacheElement;
  static constexpr bool kConverts = sizeof(Cached) == 1;
  using Math = std::conditional_t<kConverts, __half, T>;  // what is multiplied
  using Call = PagedAttention<T, Cached>;
  using Parameters = HopperAttention<T, Cached>;
  using Work = WorkTile;
  static constexpr bool kFixedSplits = fixed_splits, kDecodes = false, kRotates = false;
  static constexpr bool kDividesRegisters = true;  // between consumers and producers, unequally
  static constexpr bool kMany = true, kWholeTokens = true, kAlignedTiles = true;
  static constexpr int kDim = dim, kPanels = dim / kPanelColumns;
  static constexpr int kWarpgroups = dim == 64 && !kConverts ? 3 : 2;  // of 64 rows each, beside the producer
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kRowThreads = kWarpgroup * kWarpgroups, kThreads = kRowThreads + kWarpgroup;
  static constexpr int kKeys = 128;    // of a tile
  static constexpr int kBoxKeys = 64;  // of a TMA box; a block has as many or more
  static constexpr int kTileKeys = kKeys, kTeams = 1, kWholeKeys = 0;
  // Where there are enough: shared memory is read half as often. To convert them takes registers anyhow.
  static constexpr bool kQueryInRegisters = dim == 128 || kConverts;
  static constexpr float kWeightShift = kConverts ? 7.0f : 0.0f;  // probabilities grow to 2^(kSlack + kWeightShift)
  static constexpr int kQueryStages = kQueryInRegisters ? 1 : 2;
  static constexpr int kQueryElements = kRows * kDim;                // of shared memory, a stage
  static constexpr int kStages = dim == 64 ? 4 : kConverts ? 2 : 3;  // of keys, and of values
  static constexpr int kKeyStages = kStages, kValueStages = kStages;
  static constexpr int kLeastBlocks = 1;  // of a multiprocessor
  static constexpr int kStored = 2;       // stages of either as they are stored
  static constexpr int kProducerRegisters = kConverts ? 40 : dim == 64 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConverts ? 232 : dim == 64 ? 160 : 240;
  static constexpr int kPartialFloats = kRows * (kDim + 2);
  static constexpr int kSharedBytes = 2 * kDim * (kQueryStages * kRows + 2 * kStages * kKeys) +
                                      (kConverts ? 2 * kStored * kKeys * kDim : 0) +
                                      2048;  // with barriers and alignment
};

// Work of decoding: one sequence's rows by all of its keys, or by one of its fixed splits.
struct DecodeWork : WorkTile {
  int first_slot;  // of the sequence's partial results: by split, the last first, and key-value head
};

// The constants of the kernel for few rows and fixed splits: a consumer warpgroup alone does to each row what those of
// prefill do. Its queries come straight from device memory.
template <typename Element, int dim, bool rotates>
struct HopperDecodeShape : HopperShape<Element, Element, dim, true> {
  using Call = PagedAttention<Element, Element, rotates>;
  using Parameters = HopperAttention<Element, Element, rotates>;
  using Work = DecodeWork;
  static constexpr bool kDecodes = true, kMany = false, kDividesRegisters = !rotates, kRotates = rotates,
                        kQueryInRegisters = true;
  static constexpr int kWarpgroups = 1, kRows = 64;
  static constexpr int kRowThreads = kWarpgroup, kThreads = 2 * kWarpgroup;
  static constexpr int kQueryStages = 2, kQueryElements = 64;  // of work; nothing of queries is kept
  static constexpr int kPartialFloats = dim + 2;               // of a row
  // Of many sequences, which have their rotation ahead, two blocks of a multiprocessor: one loads while the other is
  // between two pieces of work. Of few each has one, and more stages.
  static constexpr int kLeastBlocks = rotates ? 1 : 2;
  static constexpr int kKeyStages = dim == 64 ? (rotates ? 4 : 3) : (rotates ? 3 : 2);
  static constexpr int kValueStages = dim == 64 ? kKeyStages : rotates ? 3 : 1;
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 224;
  static constexpr int kSharedBytes =
      2 * dim * (kKeyStages + kValueStages) * 128 + 2 * kQueryStages * kQueryElements + 4096;
};

// Tiles as they are stored, where they are converted.
template <typename S, bool converts>
struct StoredTiles {};
template <typename S>
struct StoredTiles<S, true> {
  alignas(1024) Float8 stored_keys[S::kStored][S::kKeys * S::kDim];
  alignas(1024) Float8 stored_values[S::kStored][S::kKeys * S::kDim];
};

template <typename S>
struct HopperShared : StoredTiles<S, S::kConverts> {
  alignas(1024) typename S::T query[S::kQueryStages][S::kQueryElements];  // panels of kRows rows
  alignas(1024) typename S::Math keys[S::kKeyStages][S::kKeys * S::kDim];
  alignas(1024) typename S::Math values[S::kValueStages][S::kKeys * S::kDim];
  uint64_t query_full[S::kQueryStages], query_empty[S::kQueryStages];
  uint64_t keys_full[S::kKeyStages], keys_empty[S::kKeyStages];
  uint64_t values_full[S::kValueStages], values_empty[S::kValueStages];
  typename S::Work work[S::kQueryStages];  // comes with the queries; no rows: there is no more
  int merges;
  uint64_t stored_keys_full[S::kStored], stored_values_full[S::kStored];  // of tiles that are converted
};

}  // namespace lamina
