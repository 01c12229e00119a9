// Programmatic dependent launch (PDL, sm_90 and later): a kernel that starts while its predecessor still runs.
//
// Inside a CUDA graph a kernel launched by launch_pdl may begin before the kernel ahead of it has ended. Before
// wait_for_predecessor it writes nothing, and it reads nothing that a kernel of the graph writes. Of every such kernel
// some block calls that, and every block that has work, so the end of one implies the end of all before it.
//
// A kernel begins when every block of the one ahead has called start_successor, or ended. Where all of them call it
// behind their own wait_for_predecessor, what was written further ahead is there when the next kernel begins, and that
// may read it before it waits: in the L2 cache, past the L1 cache. It still writes nothing before it waits, as the one
// ahead still reads. linear's GEMMs promise that of their x where asked to, and lora relies on it; a kernel between the
// two begins later still, and changes nothing of it.
#pragma once

#include <cuda_runtime.h>

namespace lamina {

// griddepcontrol.wait: waits until the kernel ahead has ended and what it wrote is visible.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: lets the next kernel begin, once every block has called this or ended.
__device__ __forceinline__ void start_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, for a kernel that has nothing to do beforehand.
__device__ __forceinline__ void follow_predecessor() {
  start_successor();
  wait_for_predecessor();
}

constexpr int kFewBlocks = 16;

// What a kernel of few blocks does, twice: body(false) while the kernel ahead still runs, on anything and without
// writing, and then body(true), which is to wait for it. Such a kernel ran on other processors before, and here its
// instructions are in no cache; each line of them that is missing takes as long as one of memory. body(false) must not
// leave in the L1 cache what the kernel ahead writes. Of many blocks those behind find the instructions, and
// body(true) is all.
template <typename Body>
__device__ __forceinline__ void rehearse(const Body& body) {
#pragma unroll 1
  for (int left = gridDim.x <= kFewBlocks; left >= 0; --left) body(left == 0);
}

// The error, cleared from the CUDA runtime where it is one, so that nobody finds it later as if it were of another
// kernel.
inline cudaError_t cleared(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

constexpr bool kHasPdl = __CUDA_ARCH_LIST__ >= 900;

// As kernel<<<grid, block, shared, stream>>>(arguments...) in clusters of `cluster` blocks along x; where is_pdl, it
// may begin before the kernel ahead has ended.
template <typename... Parameters, typename... Arguments>
inline cudaError_t launch_clusters(bool is_pdl, unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                   size_t shared, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (is_pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {cluster, 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = count;
  return cleared(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// The same, with PDL while a CUDA graph is captured: outside, the kernel ahead may be the one that wrote the weights.
template <typename Kernel, typename... Arguments>
inline cudaError_t launch_clusters_pdl(unsigned cluster, Kernel kernel, dim3 grid, dim3 block, size_t shared,
                                       cudaStream_t stream, Arguments... arguments) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (kHasPdl) {
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error != cudaSuccess) return cleared(error);
  }
  return launch_clusters(status == cudaStreamCaptureStatusActive, cluster, kernel, grid, block, shared, stream,
                         arguments...);
}

// As kernel<<<grid, block, 0, stream>>>(arguments...).
template <typename... Parameters, typename... Arguments>
inline cudaError_t launch_pdl(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                              Arguments... arguments) {
  return launch_clusters_pdl(1, kernel, grid, block, 0, stream, arguments...);
}

}  // namespace lamina
