// The kernel for Hopper: its parameters, its constants and its shared memory.
#pragma once

#include "kernel.cuh"
#include "pipeline.cuh"
#include "warpgroup.cuh"

namespace lamina {

// The call, and the TMA tensor maps of its tensors.
template <typename T>
struct HopperAttention {
  CUtensorMap query_map;           // head_dim, head of the group, key-value head, token
  CUtensorMap key_map, value_map;  // head_dim, key-value head, token of the block, block
  PagedAttention<T> call;
  int32_t* tile_counter;        // units of work that were taken; zero before and after
  int block_mask, block_shift;  // a block holds block_mask + 1 = 2^block_shift keys
};

// The constants of the kernel for one head_dim.
template <typename Element, int dim>
struct HopperShape {
  using T = Element;
  using Cached = T;
  using Call = PagedAttention<T>;
  using Parameters = HopperAttention<T>;
  static constexpr bool kMany = true, kWholeTokens = true, kAlignedTiles = true;
  static constexpr int kDim = dim, kPanels = dim / kPanelColumns;
  static constexpr int kWarpgroups = dim == 64 ? 3 : 2;  // of 64 rows each, beside the producer
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kRowThreads = kWarpgroup * kWarpgroups, kThreads = kRowThreads + kWarpgroup;
  static constexpr int kKeys = 128;    // of a tile
  static constexpr int kBoxKeys = 64;  // of a TMA box; a block has as many or more
  static constexpr int kTileKeys = kKeys, kTeams = 1, kWholeKeys = 0;
  static constexpr bool kQueryInRegisters = dim == 128;  // where there are enough: shared memory is read half as often
  static constexpr int kQueryStages = kQueryInRegisters ? 1 : 2;
  static constexpr int kStages = dim == 64 ? 4 : 3;  // of keys, and of values
  static constexpr int kProducerRegisters = dim == 64 ? 32 : 24, kConsumerRegisters = dim == 64 ? 160 : 240;
  static constexpr int kPartialFloats = kRows * (kDim + 2);
  static constexpr int kSharedBytes =
      2 * kDim * (kQueryStages * kRows + 2 * kStages * kKeys) + 2048;  // with barriers and alignment
};

template <typename S>
struct HopperShared {
  alignas(1024) typename S::T query[S::kQueryStages][S::kRows * S::kDim];  // panels of kRows rows
  alignas(1024) typename S::T keys[S::kStages][S::kKeys * S::kDim];
  alignas(1024) typename S::T values[S::kStages][S::kKeys * S::kDim];
  uint64_t query_full[S::kQueryStages], query_empty[S::kQueryStages];
  uint64_t keys_full[S::kStages], keys_empty[S::kStages];
  uint64_t values_full[S::kStages], values_empty[S::kStages];
  WorkTile work[S::kQueryStages];  // comes with the queries; no rows: there is no more
  int merges;
};

}  // namespace lamina
