// The C entry point of mlp_w8a8 on CUDA.
#include "kernel.cuh"
#include "scaled_arguments.cuh"

extern "C" {
int64_t mlp_w8a8_arguments_size() { return sizeof(lamina::ScaledLinearArguments); }

int mlp_w8a8(const lamina::ScaledLinearArguments* a) {
#if LAMINA_HOPPER
  return lamina::with_scaled_linear(
      *a, [&](const auto& p) { return lamina::gated_scaled_linear(p, a->weight, a->x, a->config, a->stream); });
#else
  return cudaErrorNotSupported;
#endif
}
}
