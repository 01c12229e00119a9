// csrc/keep_typical/kernel.cuh on a host.
#include "../../../csrc/keep_typical/kernel.cuh"

namespace lamina {
double typical_memory[host::kShared / sizeof(double)];
}

// As custom_ops/keep_typical/_cuda.py packs them.
struct Arguments {
  float* logits;
  const float *temperature, *typical_p;
  int64_t row_stride, num_rows, vocab, stream;
};

extern "C" void run(const Arguments* p) {
  const lamina::Typical args{p->logits, p->temperature, p->typical_p, p->row_stride, static_cast<int>(p->vocab)};
  static_assert(sizeof(lamina::TypicalShared) <= host::kShared, "as a card has it");
  host::launch(static_cast<unsigned>(p->num_rows), 1, lamina::kTypicalThreads,
               reinterpret_cast<char*>(lamina::typical_memory), [&] { lamina::keep_typical_kernel(args); });
}
