// The C entry points of rotary_and_write_kv_cache.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "kernel.h"
#include "thread_pool.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct RotaryAndWriteKvCacheArguments {
  const void* query;
  int64_t query_token, query_head;
  const void* key;
  int64_t key_token, key_head;
  const void* value;
  int64_t value_token, value_head;
  const float *cos, *sin;
  void* query_out;  // contiguous
  void* key_cache;
  int64_t key_cache_block, key_cache_token, key_cache_head;
  void* value_cache;
  int64_t value_cache_block, value_cache_token, value_cache_head;
  const int32_t* slot_mapping;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, num_blocks, block_size, threads;
  int64_t stored;  // in the caches: numbers as keys have them; 1: FP8; 2: int8
  double key_scale, value_scale;
};

namespace {

constexpr int64_t kMinParallelElements = 1 << 16, kGrain = 4;  // tokens

// -1 when done, or the index of a token whose slot is beyond the cache; then nothing is written.
template <typename T, typename Cached>
int64_t rotary_and_write_as(const RotaryAndWriteKvCacheArguments& p) {
  const int64_t num_slots = p.num_blocks * p.block_size;
  for (int64_t token = 0; token < p.num_tokens; token++)
    if (p.slot_mapping[token] >= num_slots) return token;
  const lamina::RotaryAndWrite<T, Cached> step{
      {static_cast<const T*>(p.query), p.query_token, p.query_head, p.num_heads},
      {static_cast<const T*>(p.key), p.key_token, p.key_head, p.num_kv_heads},
      {static_cast<const T*>(p.value), p.value_token, p.value_head, p.num_kv_heads},
      {static_cast<T*>(p.query_out), p.num_heads * p.head_dim, p.head_dim, p.num_heads},
      {static_cast<Cached*>(p.key_cache), p.key_cache_block, p.key_cache_token, p.key_cache_head, p.block_size},
      {static_cast<Cached*>(p.value_cache), p.value_cache_block, p.value_cache_token, p.value_cache_head, p.block_size},
      p.cos,
      p.sin,
      p.slot_mapping,
      p.head_dim / 2,
      static_cast<float>(p.key_scale),
      static_cast<float>(p.value_scale)};
  const bool is_large = p.num_tokens * (p.num_heads + 2 * p.num_kv_heads) * p.head_dim > kMinParallelElements;
  lamina::parallel_ranges(p.num_tokens, kGrain, is_large ? static_cast<int>(p.threads) : 1,
                          [&step](int64_t begin, int64_t end) {
                            for (int64_t token = begin; token < end; token++) step.run(token);
                          });
  return -1;
}

template <typename T>
int64_t rotary_and_write(const RotaryAndWriteKvCacheArguments& p) {
  if (p.stored == 2) return rotary_and_write_as<T, lamina::Int8>(p);
  return p.stored == 1 ? rotary_and_write_as<T, lamina::Float8>(p) : rotary_and_write_as<T, T>(p);
}

}  // namespace

extern "C" {
int64_t rotary_and_write_kv_cache_arguments_size() { return sizeof(RotaryAndWriteKvCacheArguments); }
int64_t rotary_and_write_kv_cache_float32(const RotaryAndWriteKvCacheArguments* p) {
  return rotary_and_write<float>(*p);
}
int64_t rotary_and_write_kv_cache_bfloat16(const RotaryAndWriteKvCacheArguments* p) {
  return rotary_and_write<lamina::BFloat16>(*p);
}
int64_t rotary_and_write_kv_cache_float16(const RotaryAndWriteKvCacheArguments* p) {
  return rotary_and_write<lamina::Float16>(*p);
}
}
