// The C entry points of adjust_logits.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>

#include "kernel.h"
#include "thread_pool.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct AdjustLogitsArguments {
  const void* logits;
  int64_t row_stride;
  const int64_t* rows;
  int32_t* history;
  int64_t history_stride;
  const int64_t *slots, *positions;
  const int32_t *token_ids, *last_tokens, *num_prompt;
  const float* penalties;
  const int32_t* bias_ids;
  const float* biases;
  int64_t num_biases;
  const int32_t* allowed;
  int64_t num_words;
  const int32_t* bad_words;
  int64_t num_bad_words, longest;
  const int32_t* banned;
  int64_t num_banned;
  float* out;
  int64_t out_stride, num_rows, num_ids, width, threads;
};

namespace {

constexpr int64_t kMinParallelLogits = 1 << 15;  // below, waking threads costs more than it saves

int32_t* tokens_of(const AdjustLogitsArguments& p, int64_t row) { return p.history + p.slots[row] * p.history_stride; }

// Writes each row's newest token to its position in the history.
void remember(const AdjustLogitsArguments& p) {
  for (int64_t row = 0; row < p.num_rows; row++) {
    const int64_t of_step = p.rows[row];
    tokens_of(p, row)[p.positions[of_step] - 1] = p.token_ids[p.last_tokens[of_step]];
  }
}

lamina::AdjustedRow row_of(const AdjustLogitsArguments& p, int64_t row) {
  lamina::AdjustedRow own;
  const int64_t of_step = p.rows[row];
  own.tokens = tokens_of(p, row), own.length = p.positions[of_step], own.num_prompt = p.num_prompt[row];
  own.repetition = p.penalties[row], own.frequency = p.penalties[p.num_rows + row];
  own.presence = p.penalties[2 * p.num_rows + row];
  own.bias_ids = p.bias_ids + row * p.num_biases, own.biases = p.biases + row * p.num_biases;
  own.num_biases = p.num_biases;
  own.allowed = p.num_words == 0 ? nullptr : p.allowed + row * p.num_words;
  own.bad_words = p.bad_words + row * p.num_bad_words * p.longest;
  own.num_bad_words = p.num_bad_words, own.longest = p.longest;
  own.banned = p.banned + of_step * p.num_banned, own.num_banned = p.num_banned;
  own.num_ids = p.num_ids;
  return own;
}

template <typename T>
int64_t adjust_logits(const AdjustLogitsArguments& p) {
  const int threads = p.num_rows * p.num_ids > kMinParallelLogits ? static_cast<int>(p.threads) : 1;
  remember(p);
  lamina::parallel_chunks(p.num_rows, threads, [&p](int64_t row) {
    thread_local lamina::RowAdjuster adjuster;
    float* out = p.out + row * p.out_stride;
    adjuster.adjust(row_of(p, row), static_cast<const T*>(p.logits) + p.rows[row] * p.row_stride, out);
    std::fill(out + p.num_ids, out + p.width, -lamina::kInfinity);
  });
  return 0;
}

}  // namespace

extern "C" {
int64_t adjust_logits_arguments_size() { return sizeof(AdjustLogitsArguments); }
int64_t adjust_logits_float32(const AdjustLogitsArguments* p) { return adjust_logits<float>(*p); }
int64_t adjust_logits_bfloat16(const AdjustLogitsArguments* p) { return adjust_logits<lamina::BFloat16>(*p); }
int64_t adjust_logits_float16(const AdjustLogitsArguments* p) { return adjust_logits<lamina::Float16>(*p); }
}
