// The C entry point of adjust_logits on CUDA.
#include "kernel.cuh"
#include "launch_shared.cuh"

namespace lamina {

template <typename T, int kWidth>
int adjust_logits(const AdjustLogitsArguments& p) {
  const auto args = unpacked<T>(p);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, kSlice)), static_cast<unsigned>(p.num_rows));
  const auto kernel = adjust_logits_kernel<T, kWidth>;
  const size_t shared_bytes = sizeof(uint32_t) * kSlice * (p.num_biases > 0 ? 2 : 1);
  if (const cudaError_t error = allow_all_shared(reinterpret_cast<const void*>(kernel))) return error;
  kernel<<<grid, kAdjustThreads, shared_bytes, p.stream>>>(args);
  return launch_error();
}

}  // namespace lamina

extern "C" {
int64_t adjust_logits_arguments_size() { return sizeof(lamina::AdjustLogitsArguments); }

int adjust_logits(const lamina::AdjustLogitsArguments* p) {
  if (p->num_rows == 0) return cudaSuccess;
  return lamina::with_dtype(p->dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    return p->writes_vectors ? lamina::adjust_logits<T, lamina::kVecWidth<float>>(*p) : lamina::adjust_logits<T, 1>(*p);
  });
}
}
