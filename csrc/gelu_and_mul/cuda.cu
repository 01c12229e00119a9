// The C entry point of gelu_and_mul on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t gelu_and_mul_arguments_size() { return sizeof(lamina::GateArguments); }

int gelu_and_mul(const lamina::GateArguments* p) { return lamina::gelu_and_mul(*p); }
}
