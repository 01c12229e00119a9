// The C entry point of mlp_w8a8 on CUDA of whole numbers: a library of its own, built where it is used.
#define LAMINA_INT8
#include "cuda.cu"
