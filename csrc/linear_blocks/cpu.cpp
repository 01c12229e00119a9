// The C entry points of linear_blocks.
#include "kernel.h"

// As the caller packs them: 8 bytes each, strides in elements.
struct LinearBlocksArguments {
  const void* x;
  int64_t x_token;
  const uint8_t* weight;
  const void* bias;
  void* out;
  const lamina::BlockRun* runs;
  int64_t num_runs, tokens, columns, gated, threads;
};

namespace {

// Whether there are such kinds; nothing is read or written where not.
template <typename T>
int64_t linear_blocks(const LinearBlocksArguments& p) {
  for (int64_t r = 0; r < p.num_runs; r++)
    if (p.runs[r].kind < 0 || p.runs[r].kind >= lamina::kNumKinds) return 0;
  const lamina::LinearBlocks<T> op{
      static_cast<const T*>(p.x), p.x_token, p.tokens,   p.weight,  static_cast<const T*>(p.bias),
      static_cast<T*>(p.out),     p.runs,    p.num_runs, p.columns, p.gated != 0,
      static_cast<int>(p.threads)};
  op.run();
  return 1;
}

}  // namespace

extern "C" {
int64_t linear_blocks_arguments_size() { return sizeof(LinearBlocksArguments); }
int64_t linear_blocks_float32(const LinearBlocksArguments* p) { return linear_blocks<float>(*p); }
int64_t linear_blocks_bfloat16(const LinearBlocksArguments* p) { return linear_blocks<lamina::BFloat16>(*p); }
int64_t linear_blocks_float16(const LinearBlocksArguments* p) { return linear_blocks<lamina::Float16>(*p); }
}
