// silu(x) = x / (1 + exp(-x))
#pragma once

#include "gate.cuh"

namespace lamina {

struct Silu {
  template <typename T>
  __device__ __forceinline__ static float apply(float x) {
    return divide<T>(x, 1.0f + expf(-x));
  }
};

}  // namespace lamina
