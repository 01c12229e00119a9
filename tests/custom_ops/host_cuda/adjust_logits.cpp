// csrc/adjust_logits/kernel.cuh on a host, for float32.
#include "../../../csrc/adjust_logits/kernel.cuh"

namespace lamina {
alignas(16) uint32_t memory[host::kShared / sizeof(uint32_t)];
}

// As custom_ops/adjust_logits/_cuda.py packs them.
struct Arguments {
  const float* logits;
  int64_t row_stride;
  const int64_t* rows;
  const int32_t* history;
  int64_t history_stride;
  const int64_t *slots, *lengths;
  const int32_t* num_prompt;
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
  int64_t out_stride, num_rows, num_ids, width, dtype, stream;
};

extern "C" void run(const Arguments* p) {
  lamina::Adjust<float> args;
  args.logits = p->logits, args.rows = p->rows, args.history = p->history, args.slots = p->slots;
  args.lengths = p->lengths, args.num_prompt = p->num_prompt, args.penalties = p->penalties;
  args.bias_ids = p->bias_ids, args.biases = p->biases, args.allowed = p->allowed, args.bad_words = p->bad_words;
  args.banned = p->banned, args.out = p->out, args.row_stride = p->row_stride;
  args.history_stride = p->history_stride, args.out_stride = p->out_stride;
  args.num_rows = static_cast<int>(p->num_rows), args.num_biases = static_cast<int>(p->num_biases);
  args.num_words = static_cast<int>(p->num_words), args.num_bad_words = static_cast<int>(p->num_bad_words);
  args.longest = static_cast<int>(p->longest), args.num_banned = static_cast<int>(p->num_banned);
  args.num_ids = static_cast<int>(p->num_ids), args.width = static_cast<int>(p->width);
  const auto columns = static_cast<unsigned>((p->width + lamina::kSlice - 1) / lamina::kSlice);
  host::launch(columns, static_cast<unsigned>(p->num_rows), lamina::kAdjustThreads,
               reinterpret_cast<char*>(lamina::memory), [&] { lamina::adjust_logits_kernel<float>(args); });
}
