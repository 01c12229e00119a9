// The C interface of paged attention on CUDA over keys and values in FP8: a library of its own, built where it is used.
#define LAMINA_FP8_CACHE
#include "cuda.cu"
