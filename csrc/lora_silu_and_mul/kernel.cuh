// silu(gate) * up of what adapters add to a fused projection of gate and up: a cluster has the same outputs of both.
#pragma once

#include "float_ops.cuh"
#include "lora_outputs.cuh"

namespace lamina {

// Rounded where the separate ops round: gate and up, then silu(gate), then silu(gate) * up.
template <typename T>
__device__ __forceinline__ T gated(T gate, T up) {
  const auto value = static_cast<float>(gate);
  const T active = static_cast<T>(__fdividef(value, 1.0f + exp2_fast(-kLog2E * value)));
  return static_cast<T>(static_cast<float>(active) * static_cast<float>(up));
}

template <typename T, int kRows>
struct WriteGated {
  static constexpr int kParts = 2;
  static constexpr bool kMeets = false;
  const Lora<T>& p;

  __device__ __forceinline__ void init() const {}
  __device__ __forceinline__ void expect(int) const {}
  __device__ __forceinline__ void load(const Outputs<T, kRows, 2>&, const LoraTile&) const {}
  __device__ __forceinline__ void write(const Outputs<T, kRows, 2>& outputs, const LoraTile& tile, int) const {
    outputs.for_each(tile, [&](int r, int t, int row) {
      p.out[static_cast<int64_t>(outputs.tokens[t]) * p.rows[0] + row] =
          gated(outputs.values[0][r][t], outputs.values[1][r][t]);
    });
  }
};

template <typename T, int kChunks, int kRows>
__global__ void __launch_bounds__(kLoraThreads, 2) lora_silu_and_mul_kernel(const __grid_constant__ Lora<T> p) {
  extern __shared__ uint8_t shared[];
  start_successor();
  WriteGated<T, kRows> finish{p};
  add_adapters<kChunks, kRows>(p, ClusterMemory(shared_address(shared), rank_tiles<2>(p)), finish);
}

}  // namespace lamina
