// The kernel for Hopper: its parameters, its constants and its shared memory.
#pragma once

#include <type_traits>

#include "kernel.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"

namespace lamina {

// The call, and the TMA tensor maps of its tensors.
template <typename T, typename Cached = T>
struct HopperAttention {
  CUtensorMap query_map;           // head_dim, head of the group, key-value head, token
  CUtensorMap key_map, value_map;  // head_dim, key-value head, token of the block, block
  PagedAttention<T, Cached> call;
  int32_t* tile_counter;        // units of work that were taken; zero before and after
  int block_mask, block_shift;  // a block holds block_mask + 1 = 2^block_shift keys
};

// The constants of the kernel for one head_dim. Keys and values in FP8 are converted on their way: TMA brings them as
// they are stored, producer warps write them as float16, and queries and probabilities are float16, too.
template <typename Element, typename CacheElement, int dim>
struct HopperShape {
  using T = Element;
  using Cached = CacheElement;
  static constexpr bool kConverts = sizeof(Cached) == 1;
  using Math = std::conditional_t<kConverts, __half, T>;  // what is multiplied
  using Call = PagedAttention<T, Cached>;
  using Parameters = HopperAttention<T, Cached>;
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
  static constexpr int kStages = dim == 64 ? 4 : kConverts ? 2 : 3;  // of keys, and of values
  static constexpr int kStored = 2;                                  // stages of either as they are stored
  static constexpr int kProducerRegisters = kConverts ? 40 : dim == 64 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConverts ? 232 : dim == 64 ? 160 : 240;
  static constexpr int kPartialFloats = kRows * (kDim + 2);
  static constexpr int kSharedBytes = 2 * kDim * (kQueryStages * kRows + 2 * kStages * kKeys) +
                                      (kConverts ? 2 * kStored * kKeys * kDim : 0) +
                                      2048;  // with barriers and alignment
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
  alignas(1024) typename S::T query[S::kQueryStages][S::kRows * S::kDim];  // panels of kRows rows
  alignas(1024) typename S::Math keys[S::kStages][S::kKeys * S::kDim];
  alignas(1024) typename S::Math values[S::kStages][S::kKeys * S::kDim];
  uint64_t query_full[S::kQueryStages], query_empty[S::kQueryStages];
  uint64_t keys_full[S::kStages], keys_empty[S::kStages];
  uint64_t values_full[S::kStages], values_empty[S::kStages];
  WorkTile work[S::kQueryStages];  // comes with the queries; no rows: there is no more
  int merges;
  uint64_t stored_keys_full[S::kStored], stored_values_full[S::kStored];  // of tiles that are converted
};

}  // namespace lamina
