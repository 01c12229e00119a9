// The same over keys and values in FP8.
#define LAMINA_FP8_CACHE
#define LAMINA_ROTATES
#include "cuda.cu"
