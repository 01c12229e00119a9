// How a caller cuts a GEMM into blocks, and the constants that this means.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "stream_shape.cuh"

namespace lamina {

constexpr int64_t kMostBlocks = 8;  // of a cluster

// What a caller chooses.
struct Cut {
  int64_t groups, tokens, share, split, stages;
  int64_t clusters;  // of a persistent kernel, which takes tile after tile; 0: a cluster for each tile
};

// Calls function with the one of the constants that is wanted.
template <int... constants, typename Function>
inline int with_constant(int64_t wanted, const Function& function) {
  int error = cudaErrorInvalidValue;
  ((wanted == constants ? (error = function(std::integral_constant<int, constants>{})) : 0), ...);
  return error;
}

// Whether a cluster's blocks can share out rows of x in swizzles of 8, and runs of results: any other cut would write
// some of them twice or not at all.
inline bool is_even(const Cut& cut) {
  const auto is_power = [](int64_t count) { return count >= 1 && count <= kMostBlocks && (count & (count - 1)) == 0; };
  return is_power(cut.share) && is_power(cut.split) && cut.share * cut.split <= kMostBlocks &&
         cut.tokens % (cut.share * 8) == 0 && cut.stages >= 2 && cut.stages <= kMaxStages && cut.clusters >= 0;
}

// Calls function with groups and tokens as constants. Four groups are of use where the tiles of x weigh as much as
// theirs, and need registers for their sums.
template <bool kGated, int... tokens, typename Function>
inline int with_cut(const Cut& cut, const Function& function) {
  if (!is_even(cut)) return cudaErrorInvalidValue;
  return with_constant<1, 2, 4>(cut.groups, [&](auto groups) {
    return with_constant<tokens...>(cut.tokens, [&](auto columns) {
      constexpr bool kPaired = !kGated || groups.value % 2 == 0;
      constexpr bool kUseful = groups.value < 4 || columns.value == 64 || columns.value == 128;
      if constexpr (kPaired && kUseful) return function(groups, columns);
      return static_cast<int>(cudaErrorInvalidValue);
    });
  });
}

}  // namespace lamina
