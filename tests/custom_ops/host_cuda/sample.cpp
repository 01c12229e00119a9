// csrc/sample/kernel.cuh on a host, for float32.
#include "sample/kernel.cuh"

namespace lamina {

alignas(host::kPage) uint4 memory[host::kRoom / sizeof(uint4)];

template <int kWidth>
void run_rows(const SampleArguments& p) {
  const auto args = unpacked<float>(p);
  const auto rows = static_cast<unsigned>(args.num_rows), blocks = static_cast<unsigned>(args.num_chunks + 15) / 16;
  const host::Shared shared(memory, sizeof(Shared) + 2 * sizeof(float) * static_cast<size_t>(args.num_chunks));
  if (!p.are_chunks_known)
    host::launch(blocks, rows, kScanWarps * kWarp, shared, [&] { scan_chunks<float, kWidth, 2>(args); });
  host::launch(rows, 1, kBlock, shared, [&] { choose_tokens<float, kWidth>(args); });
}

}  // namespace lamina

extern "C" void run(const lamina::SampleArguments* p) {
  p->is_aligned ? lamina::run_rows<4>(*p) : lamina::run_rows<1>(*p);
}
