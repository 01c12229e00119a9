// How long the L2 cache keeps what a copy brings (createpolicy, sm_80 and later).
#pragma once

#include <cstdint>

namespace lamina {

// Leaves before anything else: of data that a step reads a single time.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t read_again() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Leaves after anything else.
__device__ __forceinline__ uint64_t read_often() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace lamina
