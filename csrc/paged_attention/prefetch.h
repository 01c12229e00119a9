// Keys and values fetched into a core's own cache before they are attended to.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace lamina {

// Rows of some heads of a sequence's keys and values, in the order of memory: lines that follow each other come
// fastest. Each row is loaded, since a core drops hints where it is asked for too many lines at once; but the hint for
// a row comes kAhead keys earlier, so that a block that lies elsewhere has begun to come.
template <typename T>
class KvPrefetch {
 public:
  KvPrefetch(const Attention<T>& attention, int seq, int first_head, int last_head)
      : attention_(attention),
        table_(attention.block_tables + seq * attention.block_tables_stride),
        first_head_(first_head),
        num_heads_(last_head - first_head) {}

  void keys(int64_t first, int64_t last) const {
    for (int64_t key = first; key < std::min(first + kAhead, last); key++) each_line(key, hint);
    for (int64_t key = first; key < last; key++) {
      if (key + kAhead < last) each_line(key + kAhead, hint);
      each_line(key, touch);
    }
  }

 private:
  static constexpr int64_t kAhead = 32;
  static constexpr uintptr_t kLine = 64;

  // In assembly, where compilers leave it alone.
  static void hint(const char* line) {
#if defined(__x86_64__) || defined(__i386__)
    asm volatile("prefetcht0 %0" ::"m"(*line));
#elif defined(__aarch64__)
    asm volatile("prfm pldl1keep, [%0]" ::"r"(line));
#endif
  }
  static void touch(const char* line) { asm volatile("" ::"r"(*static_cast<const volatile char*>(line))); }

  template <typename Action>
  void each_line(int64_t key, Action action) const {
    const int64_t block = table_[key / attention_.block_size], offset = key % attention_.block_size;
    each_line(attention_.key_cache, attention_.key_strides, block, offset, action);
    each_line(attention_.value_cache, attention_.value_strides, block, offset, action);
  }

  template <typename Action>
  void each_line(const void* cache, const Strides& strides, int64_t block, int64_t offset, Action action) const {
    const int64_t size = attention_.cached_size();
    const int64_t bytes = (num_heads_ - 1) * strides.head * size + attention_.head_bytes();
    const int64_t start = block * strides.outer + offset * strides.token + first_head_ * strides.head;
    const char* row = static_cast<const char*>(cache) + start * size;
    const char* end = row + bytes;
    for (const char* line = row; line < end; line += kLine - reinterpret_cast<uintptr_t>(line) % kLine) action(line);
  }

  const Attention<T>& attention_;
  const int32_t* const table_;
  const int64_t first_head_, num_heads_;
};

}  // namespace lamina
