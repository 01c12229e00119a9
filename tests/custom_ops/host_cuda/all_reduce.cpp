// csrc/all_reduce/kernel.cuh on a host, each rank a GPU that knows of the others by what it reads alone.
#include "all_reduce/kernel.cuh"

extern "C" {
// Every rank's sums, one after another as they are given. 0: all ended well; -1: some wait for ever.
int run_ranks(const lamina::AllReduceArguments* calls, int64_t count, int64_t num_ranks, unsigned seed) {
  host::gpus.clear();
  host::gpus.resize(static_cast<size_t>(num_ranks));
  for (int64_t i = 0; i < count; ++i) {
    const int error = lamina::all_reduce(calls[i]);
    if (error != cudaSuccess) return error;
  }
  return host::run(seed, 20000) ? 0 : -1;
}
}
