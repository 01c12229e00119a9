// Activations of a gate, of a float whose result is rounded to T.
#pragma once

#include "gate.cuh"

namespace lamina {

// silu(x) = x / (1 + exp(-x))
struct Silu {
  template <typename T>
  __device__ __forceinline__ static float apply(float x) {
    return over_one_and_exp_of<T>(x, -x);
  }
};

// gelu(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2 / pi) * (x + 0.044715 x³)
struct Gelu {
  template <typename T>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kTwice = 2.0f * 0.7978845608028654f;
    return over_one_and_exp_of<T>(x, -kTwice * (x + 0.044715f * x * x * x));
  }
};

}  // namespace lamina
