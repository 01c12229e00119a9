// csrc/lora/kernel.cuh on a host, by clusters of blocks as on GPUs that have them, and by single ones.
#include "cluster.cuh"

using cudaStream_t = void*;
using std::size_t;
struct __half;
namespace lamina {
constexpr unsigned kAllLanes = 0xffffffffu;
uint8_t shared[1];  // of which the place alone is asked for
}  // namespace lamina
#include "lora/kernel.cuh"

template <typename T, int kWidth, int kTokens, int kCluster>
void run_all(const lamina::Lora<T>& p) {
  const unsigned groups = static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens);
  const auto bytes = static_cast<uint32_t>(lamina::lora_memory<kCluster>(p, kTokens));
  for (unsigned first = 0; first < groups * p.num_tiles * kCluster && host::failure.empty(); first += kCluster)
    host::run_cluster(first, kCluster, lamina::kLoraThreads, bytes,
                      [&] { lamina::lora_kernel<T, kWidth, kTokens, kCluster>(p); });
}

template <typename T, int kWidth>
void run_in(const lamina::Lora<T>& p, int64_t cluster, int64_t tokens) {
  if (cluster == 1)
    tokens == 1 ? run_all<T, kWidth, 1, 1>(p) : run_all<T, kWidth, 8, 1>(p);
  else
    tokens == 1 ? run_all<T, kWidth, 1, 8>(p) : run_all<T, kWidth, 8, 8>(p);
}

struct HostArguments {
  lamina::LoraArguments given;
  int64_t is_vectors, cluster, tokens, seed;  // tokens: of a group
};

// What went wrong; empty where nothing did.
extern "C" const char* run(const HostArguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  if (a->given.dtype == 0) {
    const auto p = lamina::unpacked<float>(a->given);
    a->is_vectors ? run_in<float, 4>(p, a->cluster, a->tokens) : run_in<float, 1>(p, a->cluster, a->tokens);
  } else {
    const auto p = lamina::unpacked<Bf16>(a->given);
    a->is_vectors ? run_in<Bf16, 8>(p, a->cluster, a->tokens) : run_in<Bf16, 1>(p, a->cluster, a->tokens);
  }
  return host::failure.c_str();
}
