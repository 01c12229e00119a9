// csrc/adjust_logits/kernel.cuh on a host, for float32.
#include "adjust_logits/kernel.cuh"

namespace lamina {

alignas(host::kPage) uint4 memory[host::kRoom / sizeof(uint4)];

template <int kWidth>
void run_rows(const AdjustLogitsArguments& p) {
  const auto args = unpacked<float>(p);
  const auto columns = static_cast<unsigned>((p.width + kSlice - 1) / kSlice);
  const host::Shared shared(memory, sizeof(uint32_t) * kSlice * (p.num_biases > 0 ? 2 : 1));
  host::launch(columns, static_cast<unsigned>(p.num_rows), kAdjustThreads, shared,
               [&] { adjust_logits_kernel<float, kWidth>(args); });
}

}  // namespace lamina

extern "C" void run(const lamina::AdjustLogitsArguments* p) {
  p->writes_vectors ? lamina::run_rows<4>(*p) : lamina::run_rows<1>(*p);
}
