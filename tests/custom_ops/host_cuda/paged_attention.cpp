// csrc/paged_attention/kernel.cuh on a host, for few rows in bfloat16.
#include "attention.cuh"

namespace lamina {

alignas(host::kPage) uint4 memory[host::kRoom / sizeof(uint4)];

}  // namespace lamina

#include "paged_attention/arguments.cuh"
#include "paged_attention/kernel.cuh"

namespace lamina {

template <typename S, typename Arguments>
void launch(const Arguments& p) {
  const auto a = unpack<typename S::Call>(p);
  const host::Shared shared(memory, S::kSharedBytes);
  const auto blocks = static_cast<unsigned>(a.num_tiles * a.num_kv_heads * a.fill_splits + a.num_extra);
  for (unsigned block = 0; block < blocks; ++block) {
    host::copies.assign(S::kThreads, std::deque<std::vector<host::Copy>>(1));
    host::launch(1, 1, S::kThreads, shared, [&] {
      blockIdx.x = block;
      paged_attention_kernel<S>(a);
    });
  }
}

// Calls function with the shape of a kernel; 1 where there is none.
template <bool kRotates, typename Function>
int with_shape(int64_t kind, int64_t head_dim, const Function& function) {
  const int64_t which = kind * 1000 + head_dim;
  if (which == 64) return function(Shape<Bf16, Bf16, 64, 0, kRotates>{});
  if (which == 128) return function(Shape<Bf16, Bf16, 128, 0, kRotates>{});
  if (which == 1064) return function(Shape<Bf16, Bf16, 64, 1, kRotates>{});
  if (which == 1128) return function(Shape<Bf16, Bf16, 128, 1, kRotates>{});
  return 1;
}

template <bool kRotates, typename Arguments>
int run(const Arguments& p, const PagedAttentionArguments& call) {
  return with_shape<kRotates>(call.kind, call.head_dim, [&](auto shape) {
    launch<decltype(shape)>(p);
    return 0;
  });
}

}  // namespace lamina

extern "C" int64_t arguments_size() { return sizeof(PagedAttentionArguments); }
extern "C" int64_t rotating_arguments_size() { return sizeof(RotatingAttentionArguments); }
extern "C" int run(const PagedAttentionArguments* p) { return lamina::run<false>(*p, *p); }
extern "C" int run_rotating(const RotatingAttentionArguments* p) { return lamina::run<true>(*p, p->attention); }

// What plans ask of a kernel.
extern "C" int shape_of(int64_t kind, int64_t head_dim, int64_t* rows, int64_t* partial_floats) {
  return lamina::with_shape<true>(kind, head_dim, [&](auto shape) {
    *rows = decltype(shape)::kRows, *partial_floats = decltype(shape)::kPartialFloats;
    return 0;
  });
}
