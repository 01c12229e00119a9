// The C entry point of zero_centred_rms_norm on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t zero_centred_rms_norm_arguments_size() { return sizeof(lamina::NormArguments); }

int zero_centred_rms_norm(const lamina::NormArguments* p) { return lamina::zero_centred_rms_norm(*p); }
}
