// A kernel that lets the next one begin at once, and writes only after a while.
#include <cstdint>

#include "pdl.cuh"

__global__ void late_copy_kernel(const uint16_t* from, uint16_t* to, int64_t count, int64_t clocks) {
  lamina::follow_predecessor();
  const int64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
  for (auto i = static_cast<int64_t>(threadIdx.x); i < count; i += blockDim.x) to[i] = from[i];
}

extern "C" int late_copy(const uint16_t* from, uint16_t* to, int64_t count, int64_t clocks, cudaStream_t stream) {
  return lamina::launch_pdl(late_copy_kernel, dim3(1), dim3(1024), stream, from, to, count, clocks);
}
