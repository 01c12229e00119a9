// Tile configuration of the GEMM kernels, as the caller chooses it, and its dispatch to template constants.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "split_k_shape.cuh"

namespace lamina {

constexpr int64_t kMostBlocks = 8;          // of a cluster
constexpr int64_t kPersistentTokens = 128;  // of a tile, at least
constexpr int64_t kMostPace = 8;

// custom_ops/linear/gemm_config.py has the same fields, with what each means.
struct GemmConfig {
  int64_t warpgroups, tile_tokens, multicast, split_k, stages;
  // Of the persistent kernel, from kPersistentTokens rows of x a block. Otherwise, of the split-K kernel, over how many
  // times kPaceClocks it loads its first weights; 0: at once.
  int64_t clusters;

  bool is_persistent() const { return clusters > 0 && tile_tokens >= kPersistentTokens; }
  int pace() const { return tile_tokens < kPersistentTokens ? static_cast<int>(clusters) : 0; }
};

// Calls function with the wanted one of the constants; cudaErrorInvalidValue where it is none of them.
template <int... constants, typename Function>
inline int with_constant(int64_t wanted, const Function& function) {
  int error = cudaErrorInvalidValue;
  ((wanted == constants ? (error = function(std::integral_constant<int, constants>{})) : 0), ...);
  return error;
}

// Whether a cluster's blocks can divide rows of x in swizzle atoms of 8, and runs of results: any other configuration
// would write some of them twice or not at all.
inline bool is_even(const GemmConfig& config) {
  const auto is_power = [](int64_t count) { return count >= 1 && count <= kMostBlocks && (count & (count - 1)) == 0; };
  return is_power(config.multicast) && is_power(config.split_k) && config.multicast * config.split_k <= kMostBlocks &&
         config.tile_tokens % (config.multicast * 8) == 0 && config.stages >= 2 && config.stages <= kMaxStages &&
         config.clusters >= 0 && config.pace() <= kMostPace;
}

// Calls function with warpgroups and tile_tokens as constants; cudaErrorInvalidValue for a pair that is not compiled.
// Four warpgroups are of use where the tiles of x weigh as much as theirs, and need registers for their sums: up to
// kFourTokens rows of x.
template <bool kGated, int kFourTokens, int... tokens, typename Function>
inline int with_gemm_config(const GemmConfig& config, const Function& function) {
  if (!is_even(config)) return cudaErrorInvalidValue;
  return with_constant<1, 2, 4>(config.warpgroups, [&](auto warpgroups) {
    return with_constant<tokens...>(config.tile_tokens, [&](auto columns) {
      constexpr bool kPaired = !kGated || warpgroups.value % 2 == 0;
      constexpr bool kUseful = warpgroups.value < 4 || (columns.value >= 64 && columns.value <= kFourTokens);
      if constexpr (kPaired && kUseful) return function(warpgroups, columns);
      return static_cast<int>(cudaErrorInvalidValue);
    });
  });
}

}  // namespace lamina
