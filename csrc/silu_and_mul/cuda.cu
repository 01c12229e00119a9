// The C entry point of silu_and_mul on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t silu_and_mul_arguments_size() { return sizeof(lamina::GateArguments); }

int silu_and_mul(const lamina::GateArguments* p) { return lamina::silu_and_mul(*p); }
}
