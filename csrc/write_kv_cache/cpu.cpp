// The C entry point of write_kv_cache.
#include "kernel.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct WriteKvCacheArguments {
  const char* key;
  int64_t key_token, key_head;
  const char* value;
  int64_t value_token, value_head;
  char* key_cache;
  int64_t key_cache_block, key_cache_token, key_cache_head;
  char* value_cache;
  int64_t value_cache_block, value_cache_token, value_cache_head;
  const int32_t* slot_mapping;
  int64_t num_tokens, num_kv_heads, head_dim, num_blocks, block_size, element_size, threads;
};

namespace {

constexpr int64_t kMinParallelBytes = 1 << 20;

void write(const WriteKvCacheArguments& p) {
  const int64_t size = p.element_size, bytes = p.head_dim * size;
  const lamina::CacheWrite key{p.key,
                               p.key_cache,
                               p.slot_mapping,
                               p.key_token * size,
                               p.key_head * size,
                               p.key_cache_block * size,
                               p.key_cache_token * size,
                               p.key_cache_head * size,
                               p.block_size,
                               p.num_kv_heads,
                               bytes};
  const lamina::CacheWrite value{p.value,
                                 p.value_cache,
                                 p.slot_mapping,
                                 p.value_token * size,
                                 p.value_head * size,
                                 p.value_cache_block * size,
                                 p.value_cache_token * size,
                                 p.value_cache_head * size,
                                 p.block_size,
                                 p.num_kv_heads,
                                 bytes};
  [[maybe_unused]] const int threads = static_cast<int>(p.threads);
  [[maybe_unused]] const bool parallel = 2 * p.num_tokens * p.num_kv_heads * bytes > kMinParallelBytes;
#pragma omp parallel for num_threads(threads) if (parallel)
  for (int64_t token = 0; token < p.num_tokens; token++) {
    key.write(token);
    value.write(token);
  }
}

}  // namespace

extern "C" {
int64_t write_kv_cache_arguments_size() { return sizeof(WriteKvCacheArguments); }

// -1, or the index of a token whose slot is beyond the cache; then nothing has been written.
int64_t write_kv_cache(const WriteKvCacheArguments* p) {
  const int64_t num_slots = p->num_blocks * p->block_size;
  for (int64_t token = 0; token < p->num_tokens; token++)
    if (p->slot_mapping[token] >= num_slots) return token;
  write(*p);
  return -1;
}
}
