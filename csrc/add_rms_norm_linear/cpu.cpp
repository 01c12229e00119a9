// The C entry points of add_rms_norm_linear.
#include "kernel.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct AddRmsNormLinearArguments {
  const void* x;
  int64_t x_token;
  const void* residual;
  int64_t residual_token;
  const void *norm_weight, *weight;
  int64_t weight_row;
  const float* scale;  // null where the weights are of x's type
  const void* bias;
  void *out, *total;
  int64_t tokens, rows, columns, gated, method, threads;
  double eps;
};

namespace {

// Whether this CPU has the method for x of type T and weights of type W; nothing is written where not.
template <typename T, typename W>
int64_t run(const AddRmsNormLinearArguments& p) {
  const lamina::Norm<T> norm{static_cast<const T*>(p.x),
                             static_cast<const T*>(p.residual),
                             static_cast<const T*>(p.norm_weight),
                             p.x_token,
                             p.residual_token,
                             p.columns,
                             static_cast<float>(p.eps),
                             static_cast<T*>(p.total)};
  const lamina::AddRmsNormLinear<T, W> op{norm,
                                          p.tokens,
                                          {static_cast<const W*>(p.weight), p.rows, p.columns, p.weight_row},
                                          p.scale,
                                          static_cast<const T*>(p.bias),
                                          p.gated != 0,
                                          static_cast<T*>(p.out)};
  return op.run(static_cast<lamina::Method>(p.method), static_cast<int>(p.threads));
}

template <typename T>
int64_t add_rms_norm_linear(const AddRmsNormLinearArguments& p) {
  return p.scale == nullptr ? run<T, T>(p) : run<T, int8_t>(p);
}

}  // namespace

extern "C" {
int64_t add_rms_norm_linear_arguments_size() { return sizeof(AddRmsNormLinearArguments); }
int64_t add_rms_norm_linear_float32(const AddRmsNormLinearArguments* p) { return add_rms_norm_linear<float>(*p); }
int64_t add_rms_norm_linear_bfloat16(const AddRmsNormLinearArguments* p) {
  return add_rms_norm_linear<lamina::BFloat16>(*p);
}
int64_t add_rms_norm_linear_float16(const AddRmsNormLinearArguments* p) {
  return add_rms_norm_linear<lamina::Float16>(*p);
}
}
