// The C entry points of scaled_linear.
#include "kernel.h"

// As the caller packs them: 8 bytes each.
struct ScaledLinearArguments {
  const float *x, *x_scale;
  const lamina::Float8* weight;
  const float* scale;
  const void* bias;
  void* out;
  int64_t tokens, rows, columns, widens, threads;  // widens: weights alone, by groups of scales or none
};

namespace {

template <typename T>
int64_t scaled_linear(const ScaledLinearArguments& p) {
  if (p.widens) {
    lamina::WidenFp8{{p.weight, p.rows, p.columns, p.columns}, p.scale, static_cast<float*>(p.out)}.run(
        static_cast<int>(p.threads));
    return 1;
  }
  const lamina::ScaledLinear<T> gemm{p.x,
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
int64_t scaled_linear_arguments_size() { return sizeof(ScaledLinearArguments); }
int64_t scaled_linear_float32(const ScaledLinearArguments* p) { return scaled_linear<float>(*p); }
int64_t scaled_linear_bfloat16(const ScaledLinearArguments* p) { return scaled_linear<lamina::BFloat16>(*p); }
int64_t scaled_linear_float16(const ScaledLinearArguments* p) { return scaled_linear<lamina::Float16>(*p); }
}
