// The C entry points of linear.
#include "kernel.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct LinearArguments {
  const void* x;
  int64_t x_token, x_column;
  const void* weight;
  int64_t weight_row;
  const void* bias;
  void* out;
  int64_t tokens, rows, columns, method, threads;
};

namespace {

// Whether this CPU has the method for this type; nothing is written where not.
template <typename T>
int64_t linear(const LinearArguments& p) {
  const lamina::Linear<T> gemm{static_cast<const T*>(p.x),
                               p.x_token,
                               p.x_column,
                               p.tokens,
                               {static_cast<const T*>(p.weight), p.rows, p.columns, p.weight_row},
                               static_cast<const T*>(p.bias),
                               static_cast<T*>(p.out)};
  return gemm.run(static_cast<lamina::Method>(p.method), static_cast<int>(p.threads));
}

}  // namespace

extern "C" {
int64_t linear_arguments_size() { return sizeof(LinearArguments); }
int64_t linear_has_amx() { return lamina::has_amx(); }
int64_t linear_float32(const LinearArguments* p) { return linear<float>(*p); }
int64_t linear_bfloat16(const LinearArguments* p) { return linear<lamina::BFloat16>(*p); }
int64_t linear_float16(const LinearArguments* p) { return linear<lamina::Float16>(*p); }
}
