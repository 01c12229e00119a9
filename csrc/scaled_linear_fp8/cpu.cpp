// The C entry points of scaled_linear_fp8.
#include "kernel.h"

// As the caller packs them: 8 bytes each.
struct ScaledLinearFp8Arguments {
  const float *x, *x_scale;
  const lamina::Float8* weight;
  const float* scale;
  const void* bias;
  void* out;
  int64_t tokens, rows, columns, widens, threads;  // widens: weights alone, by groups of scales or none
};

namespace {

template <typename T>
int64_t scaled_linear_fp8(const ScaledLinearFp8Arguments& p) {
  if (p.widens) {
    lamina::WidenFp8{{p.weight, p.rows, p.columns, p.columns}, p.scale, static_cast<float*>(p.out)}.run(
        static_cast<int>(p.threads));
    return 1;
  }
  const lamina::ScaledLinearFp8<T> gemm{p.x,
                                        p.x_scale,
                                        p.tokens,
                                        {p.weight, p.rows, p.columns, p.columns},
                                        p.scale,
                                        static_cast<const T*>(p.bias),
                                        static_cast<T*>(p.out)};
  gemm.run(static_cast<int>(p.threads));
  return 1;
}

}  // namespace

extern "C" {
int64_t scaled_linear_fp8_arguments_size() { return sizeof(ScaledLinearFp8Arguments); }
int64_t scaled_linear_fp8_float32(const ScaledLinearFp8Arguments* p) { return scaled_linear_fp8<float>(*p); }
int64_t scaled_linear_fp8_bfloat16(const ScaledLinearFp8Arguments* p) {
  return scaled_linear_fp8<lamina::BFloat16>(*p);
}
int64_t scaled_linear_fp8_float16(const ScaledLinearFp8Arguments* p) { return scaled_linear_fp8<lamina::Float16>(*p); }
}
