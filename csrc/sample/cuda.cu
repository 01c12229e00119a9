// The C entry point of sample on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct SampleArguments {
  const void* logits;
  int64_t row_stride;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seeds, *positions;
  const int32_t* banned;
  int64_t num_banned;
  float2* chunks;
  int32_t* out;
  int64_t num_rows, num_ids, is_aligned, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t sample_arguments_size() { return sizeof(SampleArguments); }

int sample(const SampleArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    lamina::Sample<T> args;
    args.logits = static_cast<const T*>(p->logits), args.row_stride = p->row_stride;
    args.temperature = p->temperature, args.top_k = p->top_k, args.top_p = p->top_p, args.min_p = p->min_p;
    args.seeds = p->seeds, args.positions = p->positions, args.banned = p->banned;
    args.chunks = p->chunks, args.out = p->out;
    args.num_rows = lamina::narrow(p->num_rows), args.num_ids = lamina::narrow(p->num_ids);
    args.num_chunks = lamina::narrow(lamina::ceil_div(p->num_ids, lamina::kChunk));
    args.num_banned = lamina::narrow(p->num_banned);
    args.id_bits = 8;
    while ((1 << args.id_bits) < args.num_chunks * lamina::kChunk) ++args.id_bits;
    return p->is_aligned ? lamina::sample<T, lamina::kVecWidth<T>>(args, p->stream)
                         : lamina::sample<T, 1>(args, p->stream);
  });
}
}
