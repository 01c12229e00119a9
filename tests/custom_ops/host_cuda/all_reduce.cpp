// csrc/all_reduce and csrc/all_reduce_add_rms_norm on a host, each rank a GPU that knows of the others by what is in
// memory.
#include "all_reduce/kernel.cuh"
#include "all_reduce_add_rms_norm/kernel.cuh"

extern "C" {
void begin(int64_t num_ranks) {
  host::gpus.clear();
  host::gpus.resize(static_cast<size_t>(num_ranks));
}

// Calls of every rank are added in the order in which they are to run there.
int add_sum(const lamina::AllReduceArguments* call) { return lamina::all_reduce(*call); }
int add_norm(const lamina::AllReduceAddNormArguments* call) { return lamina::all_reduce_add_rms_norm(*call); }

// 1 where all ended, 0 where some wait for ever.
int run(unsigned seed) { return host::run(seed, 20000) ? 1 : 0; }
}
