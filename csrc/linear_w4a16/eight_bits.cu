// The C entry point of linear_w4a16 on CUDA of weights of eight bits: a library of its own, built where it is used.
#define LAMINA_EIGHT_BITS
#include "cuda.cu"
