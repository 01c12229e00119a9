// The C entry points of sample.
#include "kernel.h"
#include "thread_pool.h"

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
  int32_t* out;
  int64_t rows, num_ids, threads;
};

namespace {

constexpr int64_t kMinParallelLogits = 1 << 15;  // below, waking threads costs more than it saves

template <typename T>
int64_t sample(const SampleArguments& p) {
  const int threads = p.rows * p.num_ids > kMinParallelLogits ? static_cast<int>(p.threads) : 1;
  lamina::parallel_chunks(p.rows, threads, [&p](int64_t r) {
    thread_local lamina::RowSampler sampler;
    const lamina::RowSettings settings{
        p.temperature[r], p.top_p[r], p.min_p[r], p.top_k[r], p.seeds[r], p.positions[r], p.banned + r * p.num_banned,
        p.num_banned};
    const T* logits = static_cast<const T*>(p.logits) + r * p.row_stride;
    p.out[r] = static_cast<int32_t>(sampler.sample(logits, p.num_ids, settings));
  });
  return 0;
}

}  // namespace

extern "C" {
int64_t sample_arguments_size() { return sizeof(SampleArguments); }
int64_t sample_float32(const SampleArguments* p) { return sample<float>(*p); }
int64_t sample_bfloat16(const SampleArguments* p) { return sample<lamina::BFloat16>(*p); }
int64_t sample_float16(const SampleArguments* p) { return sample<lamina::Float16>(*p); }
}
