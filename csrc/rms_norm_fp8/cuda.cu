// The C entry point of rms_norm_fp8 on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t rms_norm_fp8_arguments_size() { return sizeof(lamina::NormFp8Arguments); }

int rms_norm_fp8(const lamina::NormFp8Arguments* a) { return lamina::rms_norm_fp8(*a); }
}
