// The C entry points of linear_blocks.
#include "kernel.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct LinearBlocksArguments {
  const void* x;
  int64_t x_token;
  const uint8_t* weight;
  const void* bias;
  void* out;
  int64_t tokens, rows, columns, kind, gated, threads;
};

namespace {

// Whether there is such a kind; nothing is written where not.
template <typename T>
int64_t linear_blocks(const LinearBlocksArguments& p) {
  const lamina::LinearBlocks<T> op{
      static_cast<const T*>(p.x), p.x_token, p.tokens,  p.weight,     static_cast<const T*>(p.bias),
      static_cast<T*>(p.out),     p.rows,    p.columns, p.gated != 0, static_cast<int>(p.threads)};
  switch (p.kind) {  // custom_ops/linear_blocks/kinds.py has the same numbers
    case 0:
      return op.template run<lamina::Q4_0>(), 1;
    case 1:
      return op.template run<lamina::Q4_1>(), 1;
    case 2:
      return op.template run<lamina::Q8_0>(), 1;
    case 3:
      return op.template run<lamina::Q4_K>(), 1;
    case 4:
      return op.template run<lamina::Q6_K>(), 1;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {
int64_t linear_blocks_arguments_size() { return sizeof(LinearBlocksArguments); }
int64_t linear_blocks_float32(const LinearBlocksArguments* p) { return linear_blocks<float>(*p); }
int64_t linear_blocks_bfloat16(const LinearBlocksArguments* p) { return linear_blocks<lamina::BFloat16>(*p); }
int64_t linear_blocks_float16(const LinearBlocksArguments* p) { return linear_blocks<lamina::Float16>(*p); }
}
