// Kernels of one rank, or of several on one device.
#pragma once

#include "launch.cuh"
#include "pdl.cuh"

namespace lamina {

constexpr int kRankThreads = 512;    // of a block that only sums
constexpr int kPacketThreads = 128;  // of one that sends a little: more processors do so at once

// As kernel<<<dim3(blocks, num_rows), threads, 0, stream>>>(arguments...). Several ranks of one launch wait for each
// other, so it fails where not all of its blocks fit on the device at once; of one rank it may begin early.
template <typename... Parameters, typename... Arguments>
inline cudaError_t launch_ranks(void (*kernel)(Parameters...), int64_t blocks, int64_t num_rows, int64_t threads,
                                cudaStream_t stream, Arguments... arguments) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(num_rows));
  const dim3 block(static_cast<unsigned>(threads));
  if (num_rows == 1) return launch_pdl(kernel, grid, block, stream, arguments...);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  return cleared(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace lamina
