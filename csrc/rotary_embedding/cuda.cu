// The C entry point of rotary_embedding on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct RotaryEmbeddingArguments {
  const void* query;
  int64_t query_token, query_head;
  const void* key;
  int64_t key_token, key_head;
  const float *cos, *sin;
  void *query_out, *key_out;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t rotary_embedding_arguments_size() { return sizeof(RotaryEmbeddingArguments); }

int rotary_embedding(const RotaryEmbeddingArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::RotaryEmbedding<T> rotary{
        lamina::heads<const T>(p->query, p->num_heads, p->query_token, p->query_head),
        lamina::heads<const T>(p->key, p->num_kv_heads, p->key_token, p->key_head),
        lamina::heads<T>(p->query_out, p->num_heads, p->num_heads * p->head_dim, p->head_dim),
        lamina::heads<T>(p->key_out, p->num_kv_heads, p->num_kv_heads * p->head_dim, p->head_dim),
        p->cos,
        p->sin,
        lamina::narrow(p->num_tokens),
        lamina::narrow(p->head_dim / 2)};
    return lamina::rotary_embedding(rotary, p->stream);
  });
}
}
