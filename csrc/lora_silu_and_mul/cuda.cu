// The C entry point of lora_silu_and_mul on CUDA.
#include "kernel.cuh"
#include "lora_launch.cuh"

namespace {

template <int kChunks, int kRows, typename T>
int launch(const lamina::Lora<T>& p, cudaStream_t stream) {
  const auto bytes = lamina::ClusterMemory(0, lamina::rank_tiles<2>(p)).end();
  return lamina::launch_lora(lamina::lora_silu_and_mul_kernel<T, kChunks, kRows>, bytes, stream, p);
}

}  // namespace

extern "C" {
int64_t lora_silu_and_mul_arguments_size() { return sizeof(lamina::LoraArguments); }

// cudaErrorInvalidValue for what the ops it stands for must do.
int lora_silu_and_mul(const lamina::LoraArguments* a) {
  if (a->tokens == 0) return cudaSuccess;
  if (a->rows0 != a->rows1 || a->rows2 != 0) return cudaErrorInvalidValue;
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    if constexpr (LAMINA_HOPPER) {
      auto p = lamina::unpacked<T>(*a);
      p.tiled_parts = 1;
      const int num_slots = static_cast<int>(a->num_slots);
      if (!lamina::is_for_clusters<2>(p)) return cudaErrorInvalidValue;
      if (p.columns > 2 * lamina::kChunkStride) {
        lamina::divide_by_clusters(p, num_slots, 1);
        return launch<4, 1>(p, a->stream);
      }
      return lamina::divide_by_clusters(p, num_slots, 2) == 1 ? launch<2, 1>(p, a->stream) : launch<2, 2>(p, a->stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}
}
