// The C entry point of scaled_linear on CUDA.
#include "kernel.cuh"
#include "scaled_arguments.cuh"

extern "C" {
int64_t scaled_linear_arguments_size() { return sizeof(lamina::ScaledLinearArguments); }

int scaled_linear(const lamina::ScaledLinearArguments* a) {
#if LAMINA_HOPPER
  return lamina::with_scaled_linear(
      *a, [&](const auto& p) { return lamina::scaled_linear(p, a->weight, a->x, a->config, a->stream); });
#else
  return cudaErrorNotSupported;
#endif
}
}
