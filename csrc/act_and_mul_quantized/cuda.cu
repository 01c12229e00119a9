// The C entry point of act_and_mul_quantized on CUDA.
#include "architecture.cuh"
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, the stride in elements. Rows are of 16-byte vectors.
struct QuantizedGateArguments {
  const void* gate_up;
  uint8_t* out;
  float* scale;
  int64_t rows, intermediate, stride, gelu, group, format, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t act_and_mul_quantized_arguments_size() { return sizeof(QuantizedGateArguments); }

int act_and_mul_quantized(const QuantizedGateArguments* a) {
#if LAMINA_HOPPER  // whose clusters share long rows
  const lamina::QuantizedRows to{a->out, a->scale, a->rows, a->intermediate, a->group != 0};
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* gate_up = static_cast<const T*>(a->gate_up);
    return a->gelu ? lamina::quantize_gated<T, lamina::Gelu>(a->format, gate_up, a->stride, to, a->stream)
                   : lamina::quantize_gated<T, lamina::Silu>(a->format, gate_up, a->stride, to, a->stream);
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
