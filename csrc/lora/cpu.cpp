// The C entry points of lora.
#include "buffer.h"
#include "kernel.h"
#include "thread_pool.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct LoraArguments {
  const void* y;
  int64_t y_token;
  const void* x;
  int64_t x_token;
  const void *a, *b;
  const float* scales;
  const int32_t* slots;
  void* out;
  int64_t tokens, num_slots, columns, rank, threads;
  int64_t rows[lamina::kMaxLoraParts];  // 0 beyond the last part
};

namespace {

constexpr int64_t kMinParallelElements = 1 << 16;
thread_local lamina::Buffer scratch;

// -1 when done, or the index of a token whose slot there is not; then nothing is written.
template <typename T>
int64_t lora(const LoraArguments& p) {
  lamina::Lora<T> step{static_cast<const T*>(p.y),
                       p.y_token,
                       static_cast<const T*>(p.x),
                       p.x_token,
                       static_cast<const T*>(p.a),
                       static_cast<const T*>(p.b),
                       p.scales,
                       p.slots,
                       static_cast<T*>(p.out),
                       p.columns,
                       p.rank,
                       0,
                       0,
                       {}};
  for (; step.num_parts < lamina::kMaxLoraParts && p.rows[step.num_parts] > 0; step.num_parts++) {
    step.rows[step.num_parts] = p.rows[step.num_parts];
    step.num_rows += p.rows[step.num_parts];
  }
  int64_t num_adapted = 0;
  for (int64_t token = 0; token < p.tokens; token++) {
    if (p.slots[token] >= p.num_slots) return token;
    num_adapted += p.slots[token] >= 0;
  }
  const int64_t shrinks = step.num_shrinks(), expands = step.num_expands();
  float* shrunk = scratch.reserve(p.tokens * step.num_parts * p.rank);
  const int64_t work = num_adapted * p.rank * (step.num_parts * p.columns + step.num_rows);
  const int threads = work > kMinParallelElements ? static_cast<int>(p.threads) : 1;
  lamina::parallel_chunks(p.tokens * shrinks, threads,
                          [&](int64_t unit) { step.shrink_unit(unit / shrinks, unit % shrinks, shrunk); });
  lamina::parallel_chunks(p.tokens * expands, threads,
                          [&](int64_t unit) { step.expand_unit(unit / expands, unit % expands, shrunk); });
  return -1;
}

}  // namespace

extern "C" {
int64_t lora_arguments_size() { return sizeof(LoraArguments); }
int64_t lora_float32(const LoraArguments* p) { return lora<float>(*p); }
int64_t lora_bfloat16(const LoraArguments* p) { return lora<lamina::BFloat16>(*p); }
int64_t lora_float16(const LoraArguments* p) { return lora<lamina::Float16>(*p); }
}
