// csrc/all_reduce and csrc/all_reduce_add_rms_norm on a host, each rank a GPU that knows of the others by what it
// reads.
#include "all_reduce/kernel.cuh"
#include "all_reduce_add_rms_norm/kernel.cuh"

namespace {

// Every rank's calls, one after another as they are given. 0: all ended well; -1: some wait for ever.
template <typename Arguments>
int run_all(int (*launch)(const Arguments&), const Arguments* calls, int64_t count, int64_t num_ranks, unsigned seed) {
  host::gpus.clear();
  host::gpus.resize(static_cast<size_t>(num_ranks));
  for (int64_t i = 0; i < count; ++i) {
    const int error = launch(calls[i]);
    if (error != cudaSuccess) return error;
  }
  return host::run(seed, 20000) ? 0 : -1;
}

}  // namespace

extern "C" {
int run_sums(const lamina::AllReduceArguments* calls, int64_t count, int64_t num_ranks, unsigned seed) {
  return run_all(lamina::all_reduce, calls, count, num_ranks, seed);
}

int run_norms(const lamina::AllReduceAddNormArguments* calls, int64_t count, int64_t num_ranks, unsigned seed) {
  return run_all(lamina::all_reduce_add_rms_norm, calls, count, num_ranks, seed);
}
}
