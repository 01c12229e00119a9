// Rows of keys or values copied to their slots of a paged cache, on raw bytes, or rounded to FP8 or int8.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp8.h"
#include "int8_cache.h"

namespace lamina {

// A head to FP8, divided by the scale, or to int8, by a scale of its own.
using Narrow = void (*)(void* to, const void* from, float scale, int64_t count);
template <typename T>
void narrow_head(void* to, const void* from, float scale, int64_t count) {
  narrow_row(static_cast<Float8*>(to), static_cast<const T*>(from), scale, count);
}

template <typename T>
void narrow_head_to_int8(void* to, const void* from, float, int64_t count) {
  store_int8_row(static_cast<Int8*>(to), static_cast<const T*>(from), count);
}

// Strides count bytes. Rows whose slot is below 0 are skipped.
struct CacheWrite {
  const char* rows;
  char* cache;
  const int32_t* slots;
  int64_t row_stride, row_head_stride;
  int64_t block_stride, token_stride, cache_head_stride;
  int64_t block_size, num_heads, head_bytes;
  Narrow narrow;  // null: bytes are copied as they are
  int64_t head_dim;
  float scale;

  void write(int64_t token) const {
    int64_t slot = slots[token];
    if (slot < 0) return;
    const char* from = rows + token * row_stride;
    char* to = cache + slot / block_size * block_stride + slot % block_size * token_stride;
    if (narrow != nullptr) {
      for (int64_t head = 0; head < num_heads; head++)
        narrow(to + head * cache_head_stride, from + head * row_head_stride, scale, head_dim);
      return;
    }
    if (row_head_stride == head_bytes && cache_head_stride == head_bytes) {
      std::memcpy(to, from, num_heads * head_bytes);
      return;
    }
    for (int64_t head = 0; head < num_heads; head++)
      std::memcpy(to + head * cache_head_stride, from + head * row_head_stride, head_bytes);
  }
};

}  // namespace lamina
