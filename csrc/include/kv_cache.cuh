// Keys and values: heads of the tokens of one step, and the paged cache that is addressed by slot.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "fp8.cuh"
#include "vec.cuh"

namespace lamina {

// What stored keys and values are to be multiplied by: 1 but where they are stored in FP8.
template <typename Cached>
struct CacheScales {
  static constexpr float key_scale = 1.0f, value_scale = 1.0f;
};
template <>
struct CacheScales<Float8> {
  float key_scale, value_scale;
};

inline CacheScales<Float8> cache_scales(double key_scale, double value_scale) {
  return {static_cast<float>(key_scale), static_cast<float>(value_scale)};
}

// Neighbours as the cache stores them: as they are, or divided by the scale and rounded to FP8.
template <typename Cached, typename T, int kWidth>
__device__ __forceinline__ auto cached_bits(const Vec<T, kWidth>& vec, [[maybe_unused]] float scale) {
  if constexpr (std::is_same_v<Cached, T>) {
    return vec.raw;
  } else {
    float values[kWidth];
    to_floats(values, vec);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = __fdiv_rn(values[i], scale);
    if constexpr (kWidth == 1) {
      return static_cast<uint8_t>(floats_to_fp8(values[0], 0.0f));
    } else {
      uint32_t words[kWidth / 4];
#pragma unroll
      for (int i = 0; i < kWidth; i += 4)
        words[i / 4] = floats_to_fp8(values[i], values[i + 1]) | floats_to_fp8(values[i + 2], values[i + 3]) << 16;
      if constexpr (kWidth == 4)
        return words[0];
      else
        return uint2{words[0], words[1]};
    }
  }
}

template <typename Cached, typename T, int kWidth>
__device__ __forceinline__ void store_cached(Cached* to, const Vec<T, kWidth>& vec, float scale) {
  store_raw(to, cached_bits<Cached>(vec, scale));
}

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
