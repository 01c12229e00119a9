// The C entry point of silu_and_mul on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, the stride in elements.
struct SiluAndMulArguments {
  const void* gate_up;
  void* out;
  int64_t rows, intermediate, stride, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t silu_and_mul_arguments_size() { return sizeof(SiluAndMulArguments); }

int silu_and_mul(const SiluAndMulArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) {
    using T = decltype(zero);
    return lamina::silu_and_mul(static_cast<const T*>(p->gate_up), static_cast<T*>(p->out), p->rows, p->intermediate,
                                p->stride, p->stream);
  });
}
}
