// A ring of stages in shared memory that fill and empty in turn.
#pragma once

#include <cstdint>

namespace lamina {

// A position in the ring, and the parity of the phase of its barriers that is waited for.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace lamina
