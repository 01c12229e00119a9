// The C entry point of rms_norm_quantized on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t rms_norm_quantized_arguments_size() { return sizeof(lamina::QuantizedNormArguments); }

int rms_norm_quantized(const lamina::QuantizedNormArguments* a) { return lamina::rms_norm_quantized(*a); }
}
