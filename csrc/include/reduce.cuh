// Reductions over the threads of a warp or a block; the order of the terms is the same whatever the launch.
#pragma once

#include "launch.cuh"

namespace lamina {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Every lane gets the combination.
template <typename V, typename Combine>
__device__ __forceinline__ V combine_warp(V value, const Combine& combine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  return combine_warp(value, [](float a, float b) { return a + b; });
}

// Every thread of a block gets the combination: of each warp's, of which there are `warps`, and `none` for others.
template <typename V, typename Combine>
__device__ __forceinline__ V combine_warps(V value, V (&partial)[kWarp], int warps, V none, const Combine& combine) {
  value = combine_warp(value, combine);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  return combine_warp(lane < warps ? partial[lane] : none, combine);
}

// The same in a tree over the threads, whose number is a power of two; `shared` has room for all of their values, and
// may be written again when all threads have their result.
template <int kThreads, typename V, typename Combine>
__device__ __forceinline__ V combine_threads(V value, V* shared, const Combine& combine) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

}  // namespace lamina
