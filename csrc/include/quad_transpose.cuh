// 4x4 transpose of 32-bit words among the lanes of a quad.
#pragma once

#include <cstdint>

namespace lamina {

// Word i of lane j of four goes to word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | bit], bit);
      (upper ? words[i] : words[i | bit]) = other;
    }
  }
}

}  // namespace lamina
