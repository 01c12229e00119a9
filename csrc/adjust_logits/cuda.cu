// The C entry point of adjust_logits on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides in elements.
struct AdjustLogitsArguments {
  const void* logits;
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
  int64_t out_stride, num_rows, num_ids, width, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t adjust_logits_arguments_size() { return sizeof(AdjustLogitsArguments); }

int adjust_logits(const AdjustLogitsArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    if (p->num_rows == 0) return cudaSuccess;
    lamina::Adjust<T> args;
    args.logits = static_cast<const T*>(p->logits), args.rows = p->rows, args.history = p->history;
    args.slots = p->slots, args.lengths = p->lengths, args.num_prompt = p->num_prompt, args.penalties = p->penalties;
    args.bias_ids = p->bias_ids, args.biases = p->biases, args.allowed = p->allowed;
    args.bad_words = p->bad_words, args.banned = p->banned, args.out = p->out;
    args.row_stride = p->row_stride, args.history_stride = p->history_stride, args.out_stride = p->out_stride;
    args.num_rows = lamina::narrow(p->num_rows), args.num_biases = lamina::narrow(p->num_biases);
    args.num_words = lamina::narrow(p->num_words), args.num_bad_words = lamina::narrow(p->num_bad_words);
    args.longest = lamina::narrow(p->longest), args.num_banned = lamina::narrow(p->num_banned);
    args.num_ids = lamina::narrow(p->num_ids), args.width = lamina::narrow(p->width);
    const dim3 grid(static_cast<unsigned>(lamina::ceil_div(p->width, lamina::kSlice)),
                    static_cast<unsigned>(p->num_rows));
    const auto kernel = lamina::adjust_logits_kernel<T>;
    const size_t shared_bytes = sizeof(uint32_t) * lamina::kSlice * (p->num_biases > 0 ? 2 : 1);
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
    kernel<<<grid, lamina::kAdjustThreads, shared_bytes, p->stream>>>(args);
    return lamina::launch_error();
  });
}
}
