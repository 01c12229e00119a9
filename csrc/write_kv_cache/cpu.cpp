// The C entry point of write_kv_cache.
#include <initializer_list>

#include "kernel.h"
#include "thread_pool.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct WriteKvCacheArguments {
  const char* key;
  int64_t key_token, key_head, key_dim;
  const char* value;
  int64_t value_token, value_head, value_dim;
  char* key_cache;
  int64_t key_cache_block, key_cache_token, key_cache_head, key_cache_dim;
  char* value_cache;
  int64_t value_cache_block, value_cache_token, value_cache_head, value_cache_dim;
  const int32_t* slot_mapping;
  int64_t num_tokens, num_blocks, block_size, num_kv_heads, head_dim, element_size, threads;
  int64_t dtype;  // of the rows, where the caches are FP8: float32, bfloat16, float16; 3 more of int8; else -1
  double key_scale, value_scale;
};

namespace {

constexpr int64_t kMinParallelBytes = 1 << 20, kGrain = 16;  // tokens

void write(const WriteKvCacheArguments& p) {
  constexpr lamina::Narrow kNarrow[] = {nullptr,
                                        lamina::narrow_head<float>,
                                        lamina::narrow_head<lamina::BFloat16>,
                                        lamina::narrow_head<lamina::Float16>,
                                        lamina::narrow_head_to_int8<float>,
                                        lamina::narrow_head_to_int8<lamina::BFloat16>,
                                        lamina::narrow_head_to_int8<lamina::Float16>};
  const lamina::Narrow narrow = kNarrow[p.dtype + 1];
  const int64_t size = p.element_size, cached = narrow ? 1 : size, bytes = p.head_dim * size;
  const lamina::CacheWrite key{p.key,
                               p.key_cache,
                               p.slot_mapping,
                               p.key_token * size,
                               p.key_head * size,
                               p.key_cache_block * cached,
                               p.key_cache_token * cached,
                               p.key_cache_head * cached,
                               p.block_size,
                               p.num_kv_heads,
                               bytes,
                               narrow,
                               p.head_dim,
                               static_cast<float>(p.key_scale)};
  const lamina::CacheWrite value{p.value,
                                 p.value_cache,
                                 p.slot_mapping,
                                 p.value_token * size,
                                 p.value_head * size,
                                 p.value_cache_block * cached,
                                 p.value_cache_token * cached,
                                 p.value_cache_head * cached,
                                 p.block_size,
                                 p.num_kv_heads,
                                 bytes,
                                 narrow,
                                 p.head_dim,
                                 static_cast<float>(p.value_scale)};
  const bool is_large = 2 * p.num_tokens * p.num_kv_heads * bytes > kMinParallelBytes;
  lamina::parallel_ranges(p.num_tokens, kGrain, is_large ? static_cast<int>(p.threads) : 1,
                          [&](int64_t begin, int64_t end) {
                            for (int64_t token = begin; token < end; token++) key.write(token), value.write(token);
                          });
}

}  // namespace

extern "C" {
int64_t write_kv_cache_arguments_size() { return sizeof(WriteKvCacheArguments); }

// -1 when done, -2 where a last dimension is not contiguous, or the index of a token whose slot is beyond the cache;
// then nothing is written.
int64_t write_kv_cache(const WriteKvCacheArguments* p) {
  for (int64_t stride : {p->key_dim, p->value_dim, p->key_cache_dim, p->value_cache_dim})
    if (stride != 1) return -2;
  const int64_t num_slots = p->num_blocks * p->block_size;
  for (int64_t token = 0; token < p->num_tokens; token++)
    if (p->slot_mapping[token] >= num_slots) return token;
  write(*p);
  return -1;
}
}
