// Which GPUs a compilation is for.
#pragma once

// Whether it is for sm_90a; elsewhere nothing that needs its instructions may be called.
#define LAMINA_HOPPER (__CUDA_ARCH_LIST__ == 900)
