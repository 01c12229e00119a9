// The C entry point of keep_typical on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t keep_typical_arguments_size() { return sizeof(lamina::KeepTypicalArguments); }

int keep_typical(const lamina::KeepTypicalArguments* p) {
  if (p->num_rows == 0) return cudaSuccess;
  const lamina::Typical args = lamina::unpacked(*p);
  lamina::keep_typical_kernel<<<static_cast<unsigned>(p->num_rows), lamina::kTypicalThreads,
                                sizeof(lamina::TypicalShared), p->stream>>>(args);
  return lamina::launch_error();
}
}
