// The C entry point of lora_add_rms_norm on CUDA.
#include "kernel.cuh"
#include "lora_launch.cuh"

namespace {

template <int kChunks, typename T>
int launch(const lamina::Lora<T>& p, const lamina::NormOfSum<T>& norm, cudaStream_t stream) {
  const uint32_t bytes = lamina::ClusterMemory(0, lamina::rank_tiles<1>(p)).end() + lamina::NormMemory::kBytes;
  const auto with_rows = [&](auto kernel) { return lamina::launch_lora(kernel, bytes, stream, p, norm); };
  switch (lamina::norm_rows(p.num_rows)) {
    case 1:
      return with_rows(lamina::lora_add_rms_norm_kernel<T, kChunks, 1>);
    case 2:
      return with_rows(lamina::lora_add_rms_norm_kernel<T, kChunks, 2>);
    default:
      return with_rows(lamina::lora_add_rms_norm_kernel<T, kChunks, lamina::kMostNormRows>);
  }
}

}  // namespace

extern "C" {
int64_t lora_add_rms_norm_arguments_size() { return sizeof(lamina::LoraAddNormArguments); }

// cudaErrorInvalidValue for what the ops it stands for must do.
int lora_add_rms_norm(const lamina::LoraAddNormArguments* a) {
  if (a->lora.tokens == 0) return cudaSuccess;
  return lamina::with_narrow_dtype(a->lora.dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    if constexpr (LAMINA_HOPPER) {
      auto p = lamina::unpacked<T>(a->lora);
      const bool is_row = p.num_parts == 1 && lamina::norm_rows(p.num_rows) <= lamina::kMostNormRows;
      if (!is_row || !lamina::is_for_clusters<1>(p, lamina::NormMemory::kBytes)) return cudaErrorInvalidValue;
      lamina::divide_by_rows(p, static_cast<int>(a->lora.num_slots));
      const auto norm = lamina::unpacked_norm<T>(*a);
      return p.columns > 2 * lamina::kChunkStride ? launch<7>(p, norm, a->lora.stream)
                                                  : launch<2>(p, norm, a->lora.stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}
}
