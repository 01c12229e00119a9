// Launches of kernels that add low-rank adapters in clusters.
#pragma once

#include "launch.cuh"
#include "lora_outputs.cuh"

namespace lamina {

// Whether the kernels of clusters can read these tensors: in vectors, with room for the sums.
template <int kParts, typename T>
bool is_for_clusters(const Lora<T>& p) {
  const bool is_even = aligned(p.x, p.a, p.b) && whole_vecs<T>(p.columns, p.rank, p.x_token);
  return sizeof(T) == 2 && is_even && ClusterMemory(0, rank_tiles<kParts>(p)).end() <= kLoraMemory;
}

template <typename Kernel, typename T>
int launch_lora(Kernel kernel, uint32_t bytes, cudaStream_t stream, const Lora<T>& p) {
  // As the GEMMs around it need it: a processor divides its memory anew only when it is idle, so not beside another.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return cleared(error);
  return launch_clusters_pdl(kSegments, kernel, dim3(static_cast<unsigned>(num_clusters(p) * kSegments)),
                             dim3(kLoraThreads), bytes, stream, p);
}

}  // namespace lamina
