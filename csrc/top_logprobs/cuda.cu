// The C entry point of top_logprobs on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, the stride in elements.
struct TopLogprobsArguments {
  const void* logits;
  int64_t row_stride;
  const int32_t* token_ids;
  int32_t* ids;
  float* logprobs;
  int32_t* ranks;
  int64_t num_rows, num_ids, num_top, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t top_logprobs_arguments_size() { return sizeof(TopLogprobsArguments); }

int top_logprobs(const TopLogprobsArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::TopLogprobs<T> args{static_cast<const T*>(p->logits),
                                      p->row_stride,
                                      p->token_ids,
                                      p->ids,
                                      p->logprobs,
                                      p->ranks,
                                      lamina::narrow(p->num_rows),
                                      lamina::narrow(p->num_ids),
                                      lamina::narrow(p->num_top)};
    if (p->num_rows == 0) return static_cast<int>(cudaSuccess);
    lamina::top_logprobs_kernel<T><<<static_cast<unsigned>(p->num_rows), lamina::kReportThreads,
                                     lamina::report_bytes(p->num_ids, p->num_top), p->stream>>>(args);
    return lamina::launch_error();
  });
}
}
