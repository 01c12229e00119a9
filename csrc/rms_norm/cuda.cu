// C interface of the CUDA kernel of rms_norm.
#include "kernel.cuh"

extern "C" int lamina_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t hidden,
                               int64_t x_stride, double eps, int dtype, void* stream) {
  return lamina::with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return lamina::rms_norm(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(out), rows, hidden,
                            x_stride, static_cast<float>(eps), static_cast<cudaStream_t>(stream));
  });
}
