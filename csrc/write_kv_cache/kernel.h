// Rows of keys or values copied to their slots of a paged cache, on raw bytes.
#pragma once

#include <cstdint>
#include <cstring>

namespace lamina {

// Strides count bytes. Rows whose slot is below 0 are skipped.
struct CacheWrite {
  const char* rows;
  char* cache;
  const int32_t* slots;
  int64_t row_stride, row_head_stride;
  int64_t block_stride, token_stride, cache_head_stride;
  int64_t block_size, num_heads, head_bytes;

  void write(int64_t token) const {
    int64_t slot = slots[token];
    if (slot < 0) return;
    const char* from = rows + token * row_stride;
    char* to = cache + slot / block_size * block_stride + slot % block_size * token_stride;
    if (row_head_stride == head_bytes && cache_head_stride == head_bytes) {
      std::memcpy(to, from, num_heads * head_bytes);
      return;
    }
    for (int64_t head = 0; head < num_heads; head++)
      std::memcpy(to + head * cache_head_stride, from + head * row_head_stride, head_bytes);
  }
};

}  // namespace lamina
