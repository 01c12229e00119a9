// csrc/lora's kernels on a host: that of all GPUs by clusters of blocks and by single ones, that of clusters alone, and
// the one that begins beside the projection.
#include "cluster.cuh"

using cudaStream_t = void*;
using std::size_t;
struct __half;
namespace lamina {
uint8_t shared[1];  // of which the place alone is asked for
}  // namespace lamina
#include "lora/cluster_kernel.cuh"
#include "lora/early_kernel.cuh"

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
  int64_t chunks, rows;                       // that a thread of the kernels of clusters holds; 0: the other kernel
  const Bf16*
      late_y;  // what the projection has still to write to y, while x may be read; null: the kernel waits for it
};

template <int kChunks, int kRows>
void run_by_adapters(const HostArguments& a) {
  auto p = lamina::unpacked<Bf16>(a.given);
  lamina::divide_by_clusters(p, static_cast<int>(a.given.num_slots), 1);
  p.set_block_rows(kRows * lamina::kLoraThreads);
  const auto bytes = lamina::ClusterMemory(0, lamina::rank_tiles<1>(p)).end();
  for (int cluster = 0; cluster < lamina::num_clusters(p) && host::failure.empty(); ++cluster)
    host::run_cluster(static_cast<unsigned>(cluster * lamina::kSegments), lamina::kSegments, lamina::kLoraThreads,
                      bytes, [&] { lamina::lora_cluster_kernel<Bf16, kChunks, kRows>(p); });
}

// Clusters one after another, of which each begins before the projection has ended: y and the result hold NaN until
// then, when x is overwritten, which no cluster of a single group needs any more.
template <int kChunks, int kRows>
void run_early(const HostArguments& a) {
  auto p = lamina::unpacked<Bf16>(a.given);
  if (lamina::most_neighbours(p) < kRows) host::failure = "threads cannot have so many neighbours";
  lamina::divide_early(p, static_cast<int>(a.given.num_slots), 1, 1);
  p.set_block_rows(kRows * lamina::kLoraThreads);
  const auto bytes = lamina::ClusterMemory(0, lamina::rank_tiles<1>(p)).end();
  const std::vector<Bf16> x(p.x, p.x + (p.tokens - 1) * p.x_token + p.columns);
  const auto y_bytes = sizeof(Bf16) * static_cast<std::size_t>((p.tokens - 1) * p.y_token + p.num_rows);
  host::waits_until_idle = a.given.tokens <= a.given.num_slots;  // then no cluster has a second group
  for (int cluster = 0; cluster < lamina::num_clusters(p) && host::failure.empty(); ++cluster) {
    const std::vector<Bf16> before(p.out, p.out + p.tokens * p.num_rows);
    std::memcpy(const_cast<Bf16*>(p.x), x.data(), x.size() * sizeof(Bf16));
    std::memset(const_cast<Bf16*>(p.y), 0x7f, y_bytes);
    host::predecessor = [&] {
      host::check(std::memcmp(before.data(), p.out, before.size() * sizeof(Bf16)) == 0, "it writes before it waits");
      std::memcpy(const_cast<Bf16*>(p.y), a.late_y, y_bytes);
      if (host::waits_until_idle) std::memset(const_cast<Bf16*>(p.x), 0x7f, x.size() * sizeof(Bf16));
    };
    host::run_cluster(static_cast<unsigned>(cluster * lamina::kSegments), lamina::kSegments, lamina::kLoraThreads,
                      bytes, [&] { lamina::lora_early_kernel<Bf16, kChunks, kRows>(p); });
    if (host::predecessor) std::exchange(host::predecessor, nullptr)();  // of a cluster without tokens
  }
  std::memcpy(const_cast<Bf16*>(p.x), x.data(), x.size() * sizeof(Bf16));
}

void run_any_early(const HostArguments& a) {
  if (a.chunks == 7) return a.rows == 1 ? run_early<7, 1>(a) : run_early<7, 2>(a);
  if (a.rows == 1) return run_early<2, 1>(a);
  a.rows == 4 ? run_early<2, 4>(a) : run_early<2, 8>(a);
}

// What went wrong; empty where nothing did.
extern "C" const char* run(const HostArguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  if (a->late_y != nullptr) {
    run_any_early(*a);
  } else if (a->chunks != 0) {
    a->chunks == 2 && a->rows == 1   ? run_by_adapters<2, 1>(*a)
    : a->chunks == 2 && a->rows == 4 ? run_by_adapters<2, 4>(*a)
                                     : run_by_adapters<7, 2>(*a);
  } else if (a->given.dtype == 0) {
    const auto p = lamina::unpacked<float>(a->given);
    a->is_vectors ? run_in<float, 4>(p, a->cluster, a->tokens) : run_in<float, 1>(p, a->cluster, a->tokens);
  } else {
    const auto p = lamina::unpacked<Bf16>(a->given);
    a->is_vectors ? run_in<Bf16, 8>(p, a->cluster, a->tokens) : run_in<Bf16, 1>(p, a->cluster, a->tokens);
  }
  return host::failure.c_str();
}
