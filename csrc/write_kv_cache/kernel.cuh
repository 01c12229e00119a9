// cache[slot] = row for keys and values: bytes moved, by any type of that size; or numbers converted to FP8.
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

// The same into FP8, of rows of T.
template <typename T>
struct WriteFp8KvCache {
  Heads<const T> key, value;
  PagedCache<Float8> key_cache, value_cache;
  CacheScales<Float8> scales;
  const int32_t* slots;
  int num_tokens, columns, block_size;
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWriteThreads) write_fp8_kv_cache_kernel(WriteFp8KvCache<T> args) {
  follow_predecessor();
  const int token = blockIdx.x, slot = args.slots[token];
  if (slot < 0) return;
  for (int head = threadIdx.y; head < args.key.count; head += blockDim.y) {
    const T *key = args.key.at(token, head), *value = args.value.at(token, head);
    Float8* key_to = args.key_cache.at(slot, args.block_size, head);
    Float8* value_to = args.value_cache.at(slot, args.block_size, head);
    for (int column = threadIdx.x * kWidth; column < args.columns; column += blockDim.x * kWidth) {
      store_cached(key_to + column, load<kWidth>(key + column), args.scales.key_scale);
      store_cached(value_to + column, load<kWidth>(value + column), args.scales.value_scale);
    }
  }
}

template <int kWidth, typename T>
int launch_write_fp8(const WriteFp8KvCache<T>& args, cudaStream_t stream) {
  const dim3 block = heads_block(args.columns / kWidth, args.key.count, kWriteThreads);
  return launch_pdl(write_fp8_kv_cache_kernel<T, kWidth>, dim3(static_cast<unsigned>(args.num_tokens)), block, stream,
                    args);
}

template <typename T>
int write_kv_cache(const WriteFp8KvCache<T>& args, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.key.count == 0 || args.columns == 0) return cudaSuccess;
  const auto even = [](const auto& rows) { return whole_vecs<T>(rows.token_stride, rows.head_stride); };
  const bool is_even = aligned(args.key.data, args.value.data, args.key_cache.data, args.value_cache.data) &&
                       even(args.key) && even(args.value) && even(args.key_cache) && even(args.value_cache) &&
                       whole_vecs<T>(args.key_cache.block_stride, args.value_cache.block_stride, args.columns);
  return is_even ? launch_write_fp8<kVecWidth<T>>(args, stream) : launch_write_fp8<1>(args, stream);
}

template <typename T>
int write_kv_cache(const WriteKvCache<T>& args, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.key.count == 0 || args.columns == 0) return cudaSuccess;
  const dim3 block = heads_block(args.columns, args.key.count, kWriteThreads);
  return launch_pdl(write_kv_cache_kernel<T>, dim3(static_cast<unsigned>(args.num_tokens)), block, stream, args);
}

}  // namespace lamina
