// The C entry point of adjust_logits on CUDA.
#include "kernel.cuh"

extern "C" {
int64_t adjust_logits_arguments_size() { return sizeof(lamina::AdjustLogitsArguments); }

int adjust_logits(const lamina::AdjustLogitsArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    if (p->num_rows == 0) return cudaSuccess;
    const auto args = lamina::unpacked<T>(*p);
    const dim3 grid(static_cast<unsigned>(lamina::ceil_div(p->width, lamina::kSlice)),
                    static_cast<unsigned>(p->num_rows));
    const auto kernel = lamina::adjust_logits_kernel<T>;
    const size_t shared_bytes = sizeof(uint32_t) * lamina::kSlice * (p->num_biases > 0 ? 2 : 1);
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
    kernel<<<grid, lamina::kAdjustThreads, shared_bytes, p->stream>>>(args);
    return lamina::launch_error();
  });
}
}
