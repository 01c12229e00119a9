// The C entry point of quantize_rows on CUDA.
#include "architecture.cuh"
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, the stride in elements. Rows are of 16-byte vectors.
struct QuantizeRowsArguments {
  const void* x;
  uint8_t* out;
  float* scale;
  int64_t rows, columns, stride, group, format, dtype;
  cudaStream_t stream;
};

extern "C" {
int64_t quantize_rows_arguments_size() { return sizeof(QuantizeRowsArguments); }

int quantize_rows(const QuantizeRowsArguments* a) {
#if LAMINA_HOPPER  // whose clusters share long rows
  const lamina::QuantizedRows to{a->out, a->scale, a->rows, a->columns, a->group != 0};
  return lamina::with_narrow_dtype(a->dtype, [&](auto zero) {
    using T = decltype(zero);
    const lamina::PlainRows<T> from{static_cast<const T*>(a->x), a->stride};
    return lamina::with_format(a->format,
                               [&](auto one) { return lamina::quantize_rows<decltype(one), T>(from, to, a->stream); });
  });
#else
  return cudaErrorNotSupported;
#endif
}
}
