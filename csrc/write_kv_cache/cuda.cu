// The C entry point of write_kv_cache on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct WriteKvCacheArguments {
  const void* key;
  int64_t key_token, key_head;
  const void* value;
  int64_t value_token, value_head;
  void* key_cache;
  int64_t key_cache_block, key_cache_token, key_cache_head;
  void* value_cache;
  int64_t value_cache_block, value_cache_token, value_cache_head;
  const int32_t* slot_mapping;
  int64_t num_tokens, num_kv_heads, head_dim, block_size, element_size;
  int64_t dtype;  // of the rows, where the caches are FP8; else -1
  double key_scale, value_scale;
  cudaStream_t stream;
};

namespace {

template <typename T>
int write(const WriteKvCacheArguments& p) {
  const int64_t elements = sizeof(T) / p.element_size;  // of one unit
  const auto units = [&](int64_t count) { return lamina::narrow(count / elements); };
  const lamina::WriteKvCache<T> args{
      lamina::heads<const T>(p.key, p.num_kv_heads, units(p.key_token), units(p.key_head)),
      lamina::heads<const T>(p.value, p.num_kv_heads, units(p.value_token), units(p.value_head)),
      lamina::paged_cache<T>(p.key_cache, p.key_cache_block / elements, units(p.key_cache_token),
                             units(p.key_cache_head)),
      lamina::paged_cache<T>(p.value_cache, p.value_cache_block / elements, units(p.value_cache_token),
                             units(p.value_cache_head)),
      p.slot_mapping,
      lamina::narrow(p.num_tokens),
      units(p.head_dim),
      lamina::narrow(p.block_size)};
  return lamina::write_kv_cache(args, p.stream);
}

template <typename T>
int write_fp8(const WriteKvCacheArguments& p) {
  const lamina::WriteFp8KvCache<T> args{
      lamina::heads<const T>(p.key, p.num_kv_heads, p.key_token, p.key_head),
      lamina::heads<const T>(p.value, p.num_kv_heads, p.value_token, p.value_head),
      lamina::paged_cache<lamina::Float8>(p.key_cache, p.key_cache_block, p.key_cache_token, p.key_cache_head),
      lamina::paged_cache<lamina::Float8>(p.value_cache, p.value_cache_block, p.value_cache_token, p.value_cache_head),
      lamina::cache_scales(p.key_scale, p.value_scale),
      p.slot_mapping,
      lamina::narrow(p.num_tokens),
      lamina::narrow(p.head_dim),
      lamina::narrow(p.block_size)};
  return lamina::write_kv_cache(args, p.stream);
}

}  // namespace

extern "C" {
int64_t write_kv_cache_arguments_size() { return sizeof(WriteKvCacheArguments); }

int write_kv_cache(const WriteKvCacheArguments* p) {
  if (p->dtype >= 0) return lamina::with_dtype(p->dtype, [&](auto zero) { return write_fp8<decltype(zero)>(*p); });
  const int64_t sizes = p->key_token | p->key_head | p->value_token | p->value_head | p->key_cache_block |
                        p->key_cache_token | p->key_cache_head | p->value_cache_block | p->value_cache_token |
                        p->value_cache_head | p->head_dim;
  const auto launch = [&](auto zero) { return write<decltype(zero)>(*p); };
  return lamina::with_unit(p->element_size, sizes * p->element_size, launch, p->key, p->value, p->key_cache,
                           p->value_cache);
}
}
