// State of a multi-stage pipeline through shared memory.
#pragma once

#include <cstdint>

namespace lamina {

// The stage that comes next, and the parity of the barrier phase to wait for; producer and consumer each count their
// own.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace lamina
