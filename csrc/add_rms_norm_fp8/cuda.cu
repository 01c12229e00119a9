// The C entry point of add_rms_norm_fp8 on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t add_rms_norm_fp8_arguments_size() { return sizeof(lamina::SumAndNormFp8Arguments); }

int add_rms_norm_fp8(const lamina::SumAndNormFp8Arguments* a) { return lamina::add_rms_norm_fp8(*a); }
}
