// The C entry point of rms_norm on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t rms_norm_arguments_size() { return sizeof(lamina::NormArguments); }

int rms_norm(const lamina::NormArguments* p) { return lamina::rms_norm(*p); }
}
