// The C entry point of keep_typical on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, the stride in elements.
struct KeepTypicalArguments {
  float* logits;
  const float *temperature, *typical_p;
  int64_t row_stride, num_rows, vocab;
  cudaStream_t stream;
};

extern "C" {
int64_t keep_typical_arguments_size() { return sizeof(KeepTypicalArguments); }

int keep_typical(const KeepTypicalArguments* p) {
  if (p->num_rows == 0) return cudaSuccess;
  const lamina::Typical args{p->logits, p->temperature, p->typical_p, p->row_stride, lamina::narrow(p->vocab)};
  lamina::keep_typical_kernel<<<static_cast<unsigned>(p->num_rows), lamina::kTypicalThreads,
                                sizeof(lamina::TypicalShared), p->stream>>>(args);
  return lamina::launch_error();
}
}
