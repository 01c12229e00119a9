// csrc/top_logprobs/kernel.cuh on a host.
#include "top_logprobs/kernel.cuh"

namespace lamina {
int64_t report_memory[host::kShared / sizeof(int64_t)];
}

extern "C" void run(const lamina::TopLogprobsArguments* p) {
  const auto args = lamina::unpacked<float>(*p);
  host::launch(static_cast<unsigned>(p->num_rows), 1, lamina::kReportThreads,
               reinterpret_cast<char*>(lamina::report_memory), [&] { lamina::top_logprobs_kernel(args); });
}
