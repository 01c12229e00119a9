// The C entry point of rotary_and_write_kv_cache on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct RotaryAndWriteKvCacheArguments {
  const void* query;
  int64_t query_token, query_head;
  const void* key;
  int64_t key_token, key_head;
  const void* value;
  int64_t value_token, value_head;
  const float *cos, *sin;
  void* query_out;
  void* key_cache;
  int64_t key_cache_block, key_cache_token, key_cache_head;
  void* value_cache;
  int64_t value_cache_block, value_cache_token, value_cache_head;
  const int32_t* slot_mapping;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, dtype, is_fp8;  // is_fp8: the caches
  double key_scale, value_scale;
  cudaStream_t stream;
};

namespace {

template <typename T, typename Cached>
int rotary_and_write(const RotaryAndWriteKvCacheArguments& p, const lamina::CacheScales<Cached>& scales) {
  const lamina::RotaryAndWrite<T, Cached> args{
      scales,
      lamina::heads<const T>(p.query, p.num_heads, p.query_token, p.query_head),
      lamina::heads<const T>(p.key, p.num_kv_heads, p.key_token, p.key_head),
      lamina::heads<const T>(p.value, p.num_kv_heads, p.value_token, p.value_head),
      lamina::heads<T>(p.query_out, p.num_heads, p.num_heads * p.head_dim, p.head_dim),
      lamina::paged_cache<Cached>(p.key_cache, p.key_cache_block, p.key_cache_token, p.key_cache_head),
      lamina::paged_cache<Cached>(p.value_cache, p.value_cache_block, p.value_cache_token, p.value_cache_head),
      p.cos,
      p.sin,
      p.slot_mapping,
      lamina::narrow(p.num_tokens),
      lamina::narrow(p.head_dim / 2),
      lamina::narrow(p.block_size)};
  return lamina::rotary_and_write_kv_cache(args, p.stream);
}

}  // namespace

extern "C" {
int64_t rotary_and_write_kv_cache_arguments_size() { return sizeof(RotaryAndWriteKvCacheArguments); }

int rotary_and_write_kv_cache(const RotaryAndWriteKvCacheArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!p->is_fp8) return rotary_and_write<T, T>(*p, {});
    return rotary_and_write<T, lamina::Float8>(*p, lamina::cache_scales(p->key_scale, p->value_scale));
  });
}
}
