// The C entry point of lora on CUDA.
#include "cluster_kernel.cuh"
#include "early_kernel.cuh"
#include "lora_launch.cuh"

namespace {

template <int kWidth, int kTokens, typename T>
int launch(const lamina::Lora<T>& p, cudaStream_t stream) {
  constexpr int kCluster = LAMINA_HOPPER ? lamina::kSegments : 1;
  const int64_t blocks = lamina::ceil_div(p.tokens, kTokens) * p.num_tiles * kCluster;
  return lamina::launch_clusters_pdl(kCluster, lamina::lora_kernel<T, kWidth, kTokens, kCluster>,
                                     dim3(static_cast<unsigned>(blocks)), dim3(lamina::kLoraThreads),
                                     lamina::lora_memory<kCluster>(p, kTokens), stream, p);
}

template <int kWidth, typename T>
int launch_any(const lamina::Lora<T>& p, cudaStream_t stream) {
  constexpr int kCluster = LAMINA_HOPPER ? lamina::kSegments : 1;
  const bool are_many = p.tokens > lamina::kManyTokens;
  return are_many && lamina::lora_memory<kCluster>(p, 8) <= lamina::kLoraMemory ? launch<kWidth, 8>(p, stream)
                                                                                : launch<kWidth, 1>(p, stream);
}

template <int kChunks, int kRows, typename T>
int launch_clusters(const lamina::Lora<T>& p, cudaStream_t stream) {
  const auto bytes = lamina::ClusterMemory(0, lamina::rank_tiles<1>(p)).end();
  return lamina::launch_lora(lamina::lora_cluster_kernel<T, kChunks, kRows>, bytes, stream, p);
}

// In clusters that read an adapter once for all of its tokens.
template <typename T>
int launch_by_adapters(lamina::Lora<T> p, int num_slots, cudaStream_t stream) {
  if (p.columns > 2 * lamina::kChunkStride)
    return lamina::divide_by_clusters(p, num_slots, 2) == 1 ? launch_clusters<7, 1>(p, stream)
                                                            : launch_clusters<7, 2>(p, stream);
  const int rows = lamina::divide_by_clusters(p, num_slots, 4);
  if (rows == 1) return launch_clusters<2, 1>(p, stream);
  return rows == 2 ? launch_clusters<2, 2>(p, stream) : launch_clusters<2, 4>(p, stream);
}

template <int kChunks, int kRows, typename T>
int launch_early(const lamina::Lora<T>& p, cudaStream_t stream) {
  const auto bytes = lamina::ClusterMemory(0, lamina::rank_tiles<1>(p)).end();
  return lamina::launch_lora(lamina::lora_early_kernel<T, kChunks, kRows>, bytes, stream, p);
}

// The same with all but y computed beside the kernel ahead, by no more blocks than find room there if possible: of many
// columns by half of them, as for those there are registers.
template <typename T>
int launch_beside(lamina::Lora<T> p, int num_slots, int blocks, cudaStream_t stream) {
  const int most = lamina::most_neighbours(p);
  if (p.columns > 2 * lamina::kChunkStride)
    return lamina::divide_early(p, num_slots, most < 2 ? most : 2, blocks / 2) == 1 ? launch_early<7, 1>(p, stream)
                                                                                    : launch_early<7, 2>(p, stream);
  switch (lamina::divide_early(p, num_slots, most, blocks)) {
    case 1:
      return launch_early<2, 1>(p, stream);
    case 2:
      return launch_early<2, 2>(p, stream);
    case 4:
      return launch_early<2, 4>(p, stream);
    default:
      return launch_early<2, 8>(p, stream);
  }
}

}  // namespace

extern "C" {
int64_t lora_arguments_size() { return sizeof(lamina::LoraArguments); }

int lora(const lamina::LoraArguments* a) {
  if (a->tokens == 0 || a->rows0 == 0) return cudaSuccess;
  return lamina::with_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto p = lamina::unpacked<T>(*a);
    if constexpr (LAMINA_HOPPER && sizeof(T) == 2) {
      const auto num_slots = static_cast<int>(a->num_slots), beside = static_cast<int>(a->blocks_beside);
      const bool is_early = beside > 0 && p.tokens <= lamina::kWindow;
      if (lamina::is_for_clusters<1>(p))
        return is_early ? launch_beside(p, num_slots, beside, a->stream) : launch_by_adapters(p, num_slots, a->stream);
    }
    const bool even = lamina::aligned(p.x, p.a, p.b) && lamina::whole_vecs<T>(p.columns, p.rank, p.x_token);
    return even ? launch_any<lamina::kVecWidth<T>>(p, a->stream) : launch_any<1>(p, a->stream);
  });
}
}
