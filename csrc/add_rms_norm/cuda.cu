// The C entry point of add_rms_norm on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t add_rms_norm_arguments_size() { return sizeof(lamina::SumAndNormArguments); }

int add_rms_norm(const lamina::SumAndNormArguments* p) { return lamina::add_rms_norm(*p); }
}
