// The C entry point of all_reduce_add_rms_norm on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t all_reduce_add_rms_norm_arguments_size() { return sizeof(lamina::AllReduceAddNormArguments); }

int all_reduce_add_rms_norm(const lamina::AllReduceAddNormArguments* p) { return lamina::all_reduce_add_rms_norm(*p); }
}
