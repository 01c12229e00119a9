// cache[to] = cache[from] for pairs of blocks, keys and values alike; only bytes are moved.
#pragma once

#include "launch.cuh"

namespace lamina {

constexpr int kCopyThreads = 256, kCopyUnits = 4;  // units in flight a thread

// One block's data is `units` neighbouring units of the type T; blocks lie `key_stride` or `value_stride` apart.
template <typename T>
struct CopyBlocks {
  T *key_cache, *value_cache;
  int64_t key_stride, value_stride, units;
  const int32_t* mapping;  // [num_pairs, 2]: from, to
  int64_t num_pairs;
};

template <typename T>
__global__ void __launch_bounds__(kCopyThreads) copy_blocks_kernel(CopyBlocks<T> args) {
  const int64_t from = args.mapping[2 * blockIdx.x], to = args.mapping[2 * blockIdx.x + 1];
  T* cache = blockIdx.z == 0 ? args.key_cache : args.value_cache;
  const int64_t stride = blockIdx.z == 0 ? args.key_stride : args.value_stride;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kCopyThreads * kCopyUnits + threadIdx.x;
  T moved[kCopyUnits];
#pragma unroll
  for (int i = 0; i < kCopyUnits; ++i) {
    const int64_t unit = first + i * kCopyThreads;
    if (unit < args.units) moved[i] = cache[from * stride + unit];
  }
#pragma unroll
  for (int i = 0; i < kCopyUnits; ++i) {
    const int64_t unit = first + i * kCopyThreads;
    if (unit < args.units) cache[to * stride + unit] = moved[i];
  }
}

template <typename T>
int copy_blocks(const CopyBlocks<T>& args, cudaStream_t stream) {
  if (args.num_pairs == 0 || args.units == 0) return cudaSuccess;
  const auto chunks = static_cast<unsigned>(ceil_div(args.units, kCopyThreads * kCopyUnits));
  copy_blocks_kernel<T><<<dim3(static_cast<unsigned>(args.num_pairs), chunks, 2), kCopyThreads, 0, stream>>>(args);
  return launch_error();
}

}  // namespace lamina
