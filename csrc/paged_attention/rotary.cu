// The C interface of decode attention on CUDA that rotates queries and keys itself and writes the cache: a library of
// its own, built where it is used.
#define LAMINA_ROTATES
#include "cuda.cu"
