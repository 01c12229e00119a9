// csrc/keep_typical/kernel.cuh on a host.
#include "keep_typical/kernel.cuh"

namespace lamina {
alignas(host::kPage) double typical_memory[host::kRoom / sizeof(double)];
}

extern "C" void run(const lamina::KeepTypicalArguments* p) {
  const lamina::Typical args = lamina::unpacked(*p);
  const host::Shared shared(lamina::typical_memory, sizeof(lamina::TypicalShared));
  host::launch(static_cast<unsigned>(p->num_rows), 1, lamina::kTypicalThreads, shared,
               [&] { lamina::keep_typical_kernel(args); });
}
