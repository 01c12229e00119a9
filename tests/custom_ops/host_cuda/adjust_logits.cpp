// csrc/adjust_logits/kernel.cuh on a host, for float32.
#include "../../../csrc/adjust_logits/kernel.cuh"

namespace lamina {
alignas(16) uint32_t memory[host::kShared / sizeof(uint32_t)];
}

extern "C" void run(const lamina::AdjustLogitsArguments* p) {
  const auto args = lamina::unpacked<float>(*p);
  const auto columns = static_cast<unsigned>((p->width + lamina::kSlice - 1) / lamina::kSlice);
  host::launch(columns, static_cast<unsigned>(p->num_rows), lamina::kAdjustThreads,
               reinterpret_cast<char*>(lamina::memory), [&] { lamina::adjust_logits_kernel<float>(args); });
}
