// Dynamic shared memory beyond what every kernel may have.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

#include "pdl.cuh"

namespace lamina {

// Lets a kernel have all the shared memory that a block of the current device can, once a device and kernel: a limit
// that followed each launch's own need would be lowered by another thread's before the launch.
inline cudaError_t allow_all_shared(const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> allowed;
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return cleared(error);
  const std::lock_guard<std::mutex> guard(mutex);
  if (allowed.count({device, kernel}) != 0) return cudaSuccess;
  cudaFuncAttributes attributes{};
  error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  if (error == cudaSuccess) allowed.insert({device, kernel});
  return cleared(error);
}

}  // namespace lamina
