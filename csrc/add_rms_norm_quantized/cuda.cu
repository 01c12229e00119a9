// The C entry point of add_rms_norm_quantized on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t add_rms_norm_quantized_arguments_size() { return sizeof(lamina::QuantizedSumAndNormArguments); }

int add_rms_norm_quantized(const lamina::QuantizedSumAndNormArguments* a) { return lamina::add_rms_norm_quantized(*a); }
}
