// The C interface of paged attention on Hopper by fixed splits, which give a row the same bits in any batch: a library
// of its own, built where it is used.
#include "hopper_launch.cuh"
#include "query_launch.cuh"

namespace lamina {
namespace {

template <typename Function>
int with_shape(int64_t dtype, int64_t kind, int64_t head_dim, const Function& function) {
  return with_narrow_dtype(dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    const int64_t which = kind * 1000 + head_dim;
    if (which == 3064) return function(HopperShape<T, T, 64, true>{});
    if (which == 3128) return function(HopperShape<T, T, 128, true>{});
    if (which == 4064) return function(HopperDecodeShape<T, 64, false>{});
    if (which == 4128) return function(HopperDecodeShape<T, 128, false>{});
    if (which == 5064) return function(HopperDecodeShape<T, 64, true>{});
    if (which == 5128) return function(HopperDecodeShape<T, 128, true>{});
    return cudaErrorInvalidValue;
  });
}

template <typename S>
int launch(const FixedSplitArguments& p) {
  const PagedAttentionArguments& call = p.rotating.attention;
  typename S::Parameters a;
  if constexpr (S::kRotates)
    a.call = unpack<typename S::Call>(p.rotating);
  else
    a.call = unpack<typename S::Call>(call);
  a.fixed = {narrow(p.keys), narrow(p.whole_keys), narrow(p.num_slots), narrow(p.partial_rows)};
  const cudaError_t error = prepare<S>(call, a);
  if (error != cudaSuccess) return error;
  const auto blocks =
      static_cast<unsigned>(smaller(call.device_blocks, call.num_tiles * call.num_kv_heads * call.num_splits));
  return launch_clusters_pdl(1, hopper_attention_kernel<S>, blocks, S::kThreads, S::kSharedBytes,
                             reinterpret_cast<cudaStream_t>(p.stream), a);
}

}  // namespace
}  // namespace lamina

extern "C" {

int64_t paged_attention_arguments_size() { return sizeof(FixedSplitArguments); }

// As in cuda.cu; of kind 3 (prefill), 4 (decoding) or 5 (the same with rotation and cache write).
int paged_attention_shape(int dtype, int kind, int64_t head_dim, int64_t* rows, int64_t* blocks,
                          int64_t* partial_floats) {
  return lamina::with_shape(dtype, kind, head_dim, [&](auto shape) -> int {
    using S = decltype(shape);
    return lamina::query_launch<S>(lamina::hopper_attention_kernel<S>, rows, blocks, partial_floats);
  });
}

int paged_attention(const FixedSplitArguments* p) {
  const PagedAttentionArguments& call = p->rotating.attention;
  return lamina::with_shape(call.dtype, call.kind, call.head_dim,
                            [&](auto shape) -> int { return lamina::launch<decltype(shape)>(*p); });
}

}  // extern "C"
