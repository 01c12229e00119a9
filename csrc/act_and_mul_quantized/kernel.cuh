// act(gate) * up, rounded as silu_and_mul and gelu_and_mul round it, and quantized.
#pragma once

#include "activations.cuh"
#include "quantize.cuh"

namespace lamina {

template <typename Act, typename T>
struct GatedRows {
  const T* gate_up;
  int64_t stride, intermediate;

  __device__ __forceinline__ Vec<T, 8> load(int64_t row, int vec) const {
    const T* from = gate_up + row * stride + vec * 8;
    return act_and_mul<Act>(load_from_l2<8>(from), load_from_l2<8>(from + intermediate));
  }
};

template <typename T, typename Act>
int quantize_gated(int64_t format, const T* gate_up, int64_t stride, const QuantizedRows& to, cudaStream_t stream) {
  return with_format(format, [&](auto one) {
    return quantize_rows<decltype(one), T>(GatedRows<Act, T>{gate_up, stride, to.columns}, to, stream);
  });
}

}  // namespace lamina
