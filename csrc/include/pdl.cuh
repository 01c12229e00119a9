// A kernel that starts while its predecessor still runs (programmatic dependent launch, sm_90 and later).
//
// Inside a CUDA graph a kernel launched by launch_early may begin before the kernel ahead of it has ended. Before
// wait_for_predecessor it writes nothing, and it reads nothing that a kernel of the graph writes. Every block of every
// such kernel calls that, so the end of one implies the end of all before it.
#pragma once

#include <cuda_runtime.h>

namespace lamina {

// Waits until the kernel ahead has ended and what it wrote is seen.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin, once every block has said so or ended.
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

// An error that a caller is told; nobody finds it later as if it were of another kernel.
inline cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

constexpr bool kStartsEarly = __CUDA_ARCH_LIST__ >= 900;

// As kernel<<<grid, block, shared, stream>>>(arguments...) in clusters of `cluster` blocks along x; where is_early, it
// may begin before the kernel ahead has ended.
template <typename... Parameters, typename... Arguments>
inline cudaError_t launch_clusters(bool is_early, unsigned cluster, void (*kernel)(Parameters...), dim3 grid,
                                   dim3 block, size_t shared, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (is_early) {
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
  return told(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// The same, early inside of graphs: outside the kernel ahead may be the one that wrote the weights.
template <typename Kernel, typename... Arguments>
inline cudaError_t launch_clusters_early(unsigned cluster, Kernel kernel, dim3 grid, dim3 block, size_t shared,
                                         cudaStream_t stream, Arguments... arguments) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (kStartsEarly) {
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error != cudaSuccess) return told(error);
  }
  return launch_clusters(status == cudaStreamCaptureStatusActive, cluster, kernel, grid, block, shared, stream,
                         arguments...);
}

// As kernel<<<grid, block, 0, stream>>>(arguments...).
template <typename... Parameters, typename... Arguments>
inline cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                                Arguments... arguments) {
  return launch_clusters_early(1, kernel, grid, block, 0, stream, arguments...);
}

}  // namespace lamina
