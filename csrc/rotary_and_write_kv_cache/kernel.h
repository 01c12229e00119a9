// Rotates queries into a tensor of their own and keys straight into the paged cache, and copies values there.
#pragma once

#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "fp8.h"
#include "int8_cache.h"
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

template <typename T, typename Cached>
struct RotaryAndWrite {
  Heads<const T> query, key, value;
  Heads<T> query_out;
  PagedCache<Cached> key_cache, value_cache;
  const float *cos, *sin;  // [num_tokens, half]
  const int32_t* slots;    // [num_tokens]; below 0: a padding row, of which only the query is written
  int64_t half;
  float key_scale, value_scale;  // of a cache in FP8

  void run(int64_t token) const {
    for (int64_t head = 0; head < query.count; head++)
      rotate(token, query.at(token, head), query_out.at(token, head), 1.0f);
    const int64_t slot = slots[token];
    if (slot < 0) return;
    for (int64_t head = 0; head < key.count; head++) {
      rotate_key(token, key.at(token, head), key_cache.at(slot, head));
      copy(value_cache.at(slot, head), value.at(token, head));
    }
  }

 private:
  template <typename To>
  void rotate_key(int64_t token, const T* from, To* to) const {
    rotate(token, from, to, key_scale);
  }
  void rotate_key(int64_t token, const T* from, Int8* to) const {
    thread_local Buffer buffer;
    T* row = reinterpret_cast<T*>(buffer.reserve(2 * half));
    rotate(token, from, row, 1.0f);
    store_int8_row(to, row, 2 * half);
  }

  // Multiplications and sums are rounded one by one, as the formula does it: the file that includes this turns off
  // fused multiply-adds.
  template <typename To>
  void rotate(int64_t token, const T* from, To* to, float scale) const {
    for (int64_t d = 0; d < half; d += kLanes) {
      const Vec first = load_some(from + d, half - d), second = load_some(from + half + d, half - d);
      const Vec c = load_some(cos + token * half + d, half - d), s = load_some(sin + token * half + d, half - d);
      put(to + d, first * c - second * s, half - d, scale);
      put(to + half + d, second * c + first * s, half - d, scale);
    }
  }

  static void put(T* to, Vec x, int64_t count, float) { store_some(to, x, count); }
  static void put(Float8* to, Vec x, int64_t count, float scale) {
    T rounded[kLanes];
    store(rounded, x);
    store_some(to, load(rounded) / scale, count);
  }

  void copy(T* to, const T* from) const { std::memcpy(to, from, 2 * half * sizeof(T)); }
  void copy(Int8* to, const T* from) const { store_int8_row(to, from, 2 * half); }
  void copy(Float8* to, const T* from) const { narrow_row(to, from, value_scale, 2 * half); }
};

}  // namespace lamina
