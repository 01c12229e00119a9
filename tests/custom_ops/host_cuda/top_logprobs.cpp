// csrc/top_logprobs/kernel.cuh on a host.
#include "top_logprobs/kernel.cuh"

namespace lamina {
alignas(host::kPage) int64_t report_memory[host::kRoom / sizeof(int64_t)];
}

extern "C" void run(const lamina::TopLogprobsArguments* p) {
  const auto args = lamina::unpacked<float>(*p);
  const host::Shared shared(lamina::report_memory, lamina::report_bytes(p->num_ids, p->num_top));
  host::launch(static_cast<unsigned>(p->num_rows), 1, lamina::kReportThreads, shared,
               [&] { lamina::top_logprobs_kernel(args); });
}
