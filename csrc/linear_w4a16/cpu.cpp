// The C entry points of linear_w4a16.
#include "kernel.h"

// As the caller packs them: 8 bytes each, strides in elements. All but x is contiguous.
struct LinearW4A16Arguments {
  const void* x;
  int64_t x_token;
  const uint8_t* weight;
  const void *scale, *zero, *bias;
  void* out;
  int64_t tokens, rows, columns, group, method, threads;
};

namespace {

// Whether this CPU has the method for this type; nothing is written where not.
template <typename T>
int64_t linear_w4a16(const LinearW4A16Arguments& p) {
  const lamina::LinearW4A16<T> gemm{static_cast<const T*>(p.x),
                                    p.x_token,
                                    p.tokens,
                                    p.weight,
                                    static_cast<const T*>(p.scale),
                                    static_cast<const T*>(p.zero),
                                    static_cast<const T*>(p.bias),
                                    static_cast<T*>(p.out),
                                    p.rows,
                                    p.columns,
                                    p.group};
  return gemm.run(static_cast<lamina::Method>(p.method), static_cast<int>(p.threads));
}

}  // namespace

extern "C" {
int64_t linear_w4a16_arguments_size() { return sizeof(LinearW4A16Arguments); }
int64_t linear_w4a16_has_amx() {
#if defined(LAMINA_AMX)
  return lamina::has_amx();
#else
  return 0;
#endif
}
int64_t linear_w4a16_float32(const LinearW4A16Arguments* p) { return linear_w4a16<float>(*p); }
int64_t linear_w4a16_bfloat16(const LinearW4A16Arguments* p) { return linear_w4a16<lamina::BFloat16>(*p); }
int64_t linear_w4a16_float16(const LinearW4A16Arguments* p) { return linear_w4a16<lamina::Float16>(*p); }
}
