// Rotates queries into a tensor of their own and keys straight into the paged cache, and copies values there.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace lamina {

template <typename T>
struct Heads {
  T* data;
  int64_t token_stride, head_stride, count;
  T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

template <typename T>
struct PagedCache {
  T* data;
  int64_t block_stride, token_stride, head_stride, block_size;
  T* at(int64_t slot, int64_t head) const {
    return data + slot / block_size * block_stride + slot % block_size * token_stride + head * head_stride;
  }
};

template <typename T>
struct RotaryAndWrite {
  Heads<const T> query, key, value;
  Heads<T> query_out;
  PagedCache<T> key_cache, value_cache;
  const float *cos, *sin;  // [num_tokens, half]
  const int32_t* slots;    // [num_tokens]; below 0: a padding row, of which only the query is written
  int64_t half;

  void run(int64_t token) const {
    for (int64_t head = 0; head < query.count; head++) rotate(token, query.at(token, head), query_out.at(token, head));
    const int64_t slot = slots[token];
    if (slot < 0) return;
    for (int64_t head = 0; head < key.count; head++) {
      rotate(token, key.at(token, head), key_cache.at(slot, head));
      std::memcpy(value_cache.at(slot, head), value.at(token, head), 2 * half * sizeof(T));
    }
  }

 private:
  // Multiplications and sums are rounded one by one, as the formula does it: the file that includes this turns off
  // fused multiply-adds.
  void rotate(int64_t token, const T* from, T* to) const {
    for (int64_t d = 0; d < half; d += kLanes) {
      const Vec first = load_some(from + d, half - d), second = load_some(from + half + d, half - d);
      const Vec c = load_some(cos + token * half + d, half - d), s = load_some(sin + token * half + d, half - d);
      store_some(to + d, first * c - second * s, half - d);
      store_some(to + half + d, second * c + first * s, half - d);
    }
  }
};

}  // namespace lamina
