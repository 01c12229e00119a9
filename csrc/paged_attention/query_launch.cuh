// What a launch of a kernel is like on the current device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch_shared.cuh"

namespace lamina {

// Tile rows, occupancy and workspace of a kernel on the current device, which this lets it have its shared memory on.
template <typename S>
int query_launch(void (*kernel)(typename S::Parameters), int64_t* rows, int64_t* blocks, int64_t* partial_floats) {
  int device = 0, processors = 0, blocks_each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, S::kThreads, S::kSharedBytes);
  *rows = S::kRows;
  *blocks = static_cast<int64_t>(processors) * blocks_each;
  *partial_floats = S::kPartialFloats;
  return error;
}

}  // namespace lamina
