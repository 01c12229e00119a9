// The same in 16-bit types, on GPUs with clusters: an adapter is read once for all tokens of a window that have it.
#pragma once

#include "kernel.cuh"
#include "lora_outputs.cuh"

namespace lamina {

// Writes outputs as they are.
template <typename T, int kRows>
struct WriteOutputs {
  static constexpr int kParts = 1;
  static constexpr bool kMeets = false;
  const Lora<T>& p;

  __device__ __forceinline__ void init() const {}
  __device__ __forceinline__ void expect(int) const {}
  __device__ __forceinline__ void load(const Outputs<T, kRows, 1>&, const LoraTile&) const {}
  __device__ __forceinline__ void write(const Outputs<T, kRows, 1>& outputs, const LoraTile& tile, int) const {
    outputs.for_each(tile, [&](int r, int t, int row) {
      p.out[static_cast<int64_t>(outputs.tokens[t]) * p.num_rows + row] = outputs.values[0][r][t];
    });
  }
};

// Blocks that a processor has registers for. Those that hold little leave room for a GEMM's, and find it beside them.
template <int kChunks, int kRows>
constexpr int kBlocksAtOnce = kChunks * kRows == 2 ? 3 : 2;

template <typename T, int kChunks, int kRows>
__global__ void __launch_bounds__(kLoraThreads, kBlocksAtOnce<kChunks, kRows>)
    lora_cluster_kernel(const __grid_constant__ Lora<T> p) {
  extern __shared__ uint8_t shared[];
  start_successor();
  WriteOutputs<T, kRows> finish{p};
  add_adapters<kChunks, kRows>(p, ClusterMemory(shared_address(shared), rank_tiles<1>(p)), finish);
}

}  // namespace lamina
