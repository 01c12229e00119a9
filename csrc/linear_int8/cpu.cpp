// The C entry points of linear_int8.
#include "kernel.h"

// As the caller packs them: 8 bytes each.
struct LinearInt8Arguments {
  const void* x;
  int64_t x_token;
  const int8_t* weight;
  const float* scale;
  const void* bias;
  void* out;
  int64_t tokens, rows, columns, method, threads;
};

namespace {

// Whether this CPU has the method for this type; nothing is written where not.
template <typename T>
int64_t linear_int8(const LinearInt8Arguments& p) {
  const lamina::LinearInt8<T> gemm{static_cast<const T*>(p.x),
                                   p.x_token,
                                   p.tokens,
                                   {p.weight, p.rows, p.columns, p.columns},
                                   p.scale,
                                   static_cast<const T*>(p.bias),
                                   static_cast<T*>(p.out)};
  return gemm.run(static_cast<lamina::Method>(p.method), static_cast<int>(p.threads));
}

}  // namespace

extern "C" {
int64_t linear_int8_arguments_size() { return sizeof(LinearInt8Arguments); }
int64_t linear_int8_has_amx() {
#if defined(LAMINA_INT8_AS_BF16)
  return lamina::has_amx();
#else
  return 0;
#endif
}
int64_t linear_int8_float32(const LinearInt8Arguments* p) { return linear_int8<float>(*p); }
int64_t linear_int8_bfloat16(const LinearInt8Arguments* p) { return linear_int8<lamina::BFloat16>(*p); }
int64_t linear_int8_float16(const LinearInt8Arguments* p) { return linear_int8<lamina::Float16>(*p); }
}
