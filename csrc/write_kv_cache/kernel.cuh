// cache[slot] = row for keys and values; only bytes are moved, so any type of that size will do.
#pragma once

#include "kv_cache.cuh"
#include "launch.cuh"
#include "pdl.cuh"

namespace lamina {

constexpr int kWriteThreads = 512;

// Strides in units of the type T, of which a head has `columns`.
template <typename T>
struct WriteKvCache {
  Heads<const T> key, value;
  PagedCache<T> key_cache, value_cache;
  const int32_t* slots;  // [num_tokens]; below 0: a padding row
  int num_tokens, columns, block_size;
};

// One block a token.
template <typename T>
__global__ void __launch_bounds__(kWriteThreads) write_kv_cache_kernel(WriteKvCache<T> args) {
  follow_predecessor();
  const int token = blockIdx.x, slot = args.slots[token];
  if (slot < 0) return;
  for (int head = threadIdx.y; head < args.key.count; head += blockDim.y) {
    const T *key = args.key.at(token, head), *value = args.value.at(token, head);
    T* key_to = args.key_cache.at(slot, args.block_size, head);
    T* value_to = args.value_cache.at(slot, args.block_size, head);
    for (int column = threadIdx.x; column < args.columns; column += blockDim.x) {
      const T moved_key = key[column], moved_value = value[column];
      key_to[column] = moved_key;
      value_to[column] = moved_value;
    }
  }
}

template <typename T>
int write_kv_cache(const WriteKvCache<T>& args, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.key.count == 0 || args.columns == 0) return cudaSuccess;
  const dim3 block = heads_block(args.columns, args.key.count, kWriteThreads);
  return launch_pdl(write_kv_cache_kernel<T>, dim3(static_cast<unsigned>(args.num_tokens)), block, stream, args);
}

}  // namespace lamina
