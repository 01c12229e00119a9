// The C entry point of top_logprobs on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t top_logprobs_arguments_size() { return sizeof(lamina::TopLogprobsArguments); }

int top_logprobs(const lamina::TopLogprobsArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto args = lamina::unpacked<T>(*p);
    if (p->num_rows == 0) return static_cast<int>(cudaSuccess);
    lamina::top_logprobs_kernel<T><<<static_cast<unsigned>(p->num_rows), lamina::kReportThreads,
                                     lamina::report_bytes(p->num_ids, p->num_top), p->stream>>>(args);
    return lamina::launch_error();
  });
}
}
