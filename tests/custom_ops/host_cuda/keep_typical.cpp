// csrc/keep_typical/kernel.cuh on a host.
#include "keep_typical/kernel.cuh"

namespace lamina {
double typical_memory[host::kShared / sizeof(double)];
}

extern "C" void run(const lamina::KeepTypicalArguments* p) {
  const lamina::Typical args = lamina::unpacked(*p);
  static_assert(sizeof(lamina::TypicalShared) <= host::kShared, "as a card has it");
  host::launch(static_cast<unsigned>(p->num_rows), 1, lamina::kTypicalThreads,
               reinterpret_cast<char*>(lamina::typical_memory), [&] { lamina::keep_typical_kernel(args); });
}
