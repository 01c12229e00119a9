// The C entry point of qk_norm on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct QkNormArguments {
  const void* query;
  int64_t query_token, query_head;
  const void* key;
  int64_t key_token, key_head;
  const void *query_weight, *key_weight;
  void *query_out, *key_out;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
  double eps;
  int64_t zero_centred, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t qk_norm_arguments_size() { return sizeof(QkNormArguments); }

int qk_norm(const QkNormArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::QkNorm<T> norm{
        lamina::heads<const T>(p->query, p->num_heads, p->query_token, p->query_head),
        lamina::heads<const T>(p->key, p->num_kv_heads, p->key_token, p->key_head),
        lamina::heads<T>(p->query_out, p->num_heads, p->num_heads * p->head_dim, p->head_dim),
        lamina::heads<T>(p->key_out, p->num_kv_heads, p->num_kv_heads * p->head_dim, p->head_dim),
        static_cast<const T*>(p->query_weight),
        static_cast<const T*>(p->key_weight),
        p->num_tokens,
        lamina::narrow(p->head_dim),
        static_cast<float>(p->eps)};
    return p->zero_centred ? lamina::qk_norm<lamina::Weight::kZeroCentred>(norm, p->stream)
                           : lamina::qk_norm<lamina::Weight::kPlain>(norm, p->stream);
  });
}
}
