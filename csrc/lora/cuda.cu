// The C entry point of lora on CUDA.
#include "kernel.cuh"
#include "launch.cuh"

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

}  // namespace

extern "C" {
int64_t lora_arguments_size() { return sizeof(lamina::LoraArguments); }

int lora(const lamina::LoraArguments* a) {
  if (a->tokens == 0 || a->rows0 == 0) return cudaSuccess;
  return lamina::with_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto p = lamina::unpacked<T>(*a);
    const bool even = lamina::aligned(p.x, p.a, p.b) && lamina::whole_vecs<T>(p.columns, p.rank, p.x_token);
    return even ? launch_any<lamina::kVecWidth<T>>(p, a->stream) : launch_any<1>(p, a->stream);
  });
}
}
