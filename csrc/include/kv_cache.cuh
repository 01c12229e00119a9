// Keys and values: heads of the tokens of one step, and the paged cache that is addressed by slot.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lamina {

// [num_tokens, count, head_dim] by strides in elements; the elements of a head are neighbours.
template <typename T>
struct Heads {
  T* data;
  int count, token_stride, head_stride;

  __device__ __forceinline__ T* at(int token, int head) const {
    return data + static_cast<int64_t>(token) * token_stride + head * head_stride;
  }
};

template <typename T, typename Pointer>
Heads<T> heads(Pointer* data, int64_t count, int64_t token_stride, int64_t head_stride) {
  return {static_cast<T*>(data), static_cast<int>(count), static_cast<int>(token_stride),
          static_cast<int>(head_stride)};
}

// [num_blocks, block_size, num_kv_heads, head_dim] likewise; slot = block * block_size + place in the block.
template <typename T>
struct PagedCache {
  T* data;
  int64_t block_stride;
  int token_stride, head_stride;

  __device__ __forceinline__ T* at(int slot, int block_size, int head) const {
    return data + slot / block_size * block_stride + slot % block_size * token_stride + head * head_stride;
  }
};

template <typename T>
PagedCache<T> paged_cache(void* data, int64_t block_stride, int64_t token_stride, int64_t head_stride) {
  return {static_cast<T*>(data), block_stride, static_cast<int>(token_stride), static_cast<int>(head_stride)};
}

}  // namespace lamina
