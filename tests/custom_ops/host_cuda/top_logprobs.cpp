// csrc/top_logprobs/kernel.cuh on a host.
#include "../../../csrc/top_logprobs/kernel.cuh"

namespace lamina {
int64_t report_memory[host::kShared / sizeof(int64_t)];
}

// As custom_ops/top_logprobs/_cuda.py packs them.
struct Arguments {
  const float* logits;
  int64_t row_stride;
  const int32_t* token_ids;
  int32_t* ids;
  float* logprobs;
  int32_t* ranks;
  int64_t num_rows, num_ids, num_top, dtype, stream;
};

extern "C" void run(const Arguments* p) {
  const lamina::TopLogprobs<float> args{p->logits,
                                        p->row_stride,
                                        p->token_ids,
                                        p->ids,
                                        p->logprobs,
                                        p->ranks,
                                        static_cast<int>(p->num_rows),
                                        static_cast<int>(p->num_ids),
                                        static_cast<int>(p->num_top)};
  host::launch(static_cast<unsigned>(p->num_rows), 1, lamina::kReportThreads,
               reinterpret_cast<char*>(lamina::report_memory), [&] { lamina::top_logprobs_kernel(args); });
}
