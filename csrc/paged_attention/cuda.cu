// The C interface of paged attention on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each. Strides count elements; rows start at multiples of 16 bytes.
struct PagedAttentionArguments {
  int64_t out, out_token, out_head;
  int64_t query, query_token, query_head;
  int64_t key_cache, key_block, key_token, key_head;
  int64_t value_cache, value_block, value_token, value_head;
  int64_t block_tables, block_tables_stride, seq_lens, query_start_loc;
  int64_t num_seqs, num_heads, num_kv_heads, head_dim, block_size, window;
  int64_t partials, arrivals;
  int64_t num_tiles, num_splits, fill_splits, min_split_keys, max_split_keys, min_rows, max_rows;
  double scale, soft_cap;
  int64_t dtype, kind, stream;
};

namespace lamina {
namespace {

template <typename T, int kind, typename Function>
int with_dim(int64_t head_dim, const Function& function) {
  if (head_dim <= 64) return function(Shape<T, 64, kind>{});
  if (sizeof(T) == 2 && head_dim <= 96) return function(Shape<T, sizeof(T) == 2 ? 96 : 128, kind>{});
  if (head_dim <= 128) return function(Shape<T, 128, kind>{});
  if (head_dim <= 256) return function(Shape<T, 256, kind>{});
  return cudaErrorInvalidValue;
}

// Calls function with the Shape of a kernel.
template <typename Function>
int with_shape(int dtype, int kind, int64_t head_dim, const Function& function) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (kind) {
      case 0:
        return with_dim<T, 0>(head_dim, function);
      case 1:
        return with_dim<T, 1>(head_dim, function);
      default:
        return with_dim<T, 2>(head_dim, function);
    }
  });
}

// Lets the kernel have its shared memory on the current device.
template <typename S>
cudaError_t prepare() {
  const auto kernel = paged_attention_kernel<S>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

template <typename S>
PagedAttention<typename S::T> unpack(const PagedAttentionArguments& p) {
  using T = typename S::T;
  constexpr int64_t kUnit = 16 / static_cast<int64_t>(sizeof(T));
  constexpr double kLog2E = 1.4426950408889634;
  const auto strides = [](int64_t block, int64_t token, int64_t head) {
    return Strides{static_cast<uint32_t>(block / kUnit), static_cast<uint32_t>(token / kUnit),
                   static_cast<uint32_t>(head / kUnit)};
  };
  const bool capped = p.soft_cap > 0;
  PagedAttention<T> a;
  a.out = reinterpret_cast<T*>(p.out);
  a.query = reinterpret_cast<const T*>(p.query);
  a.key_cache = reinterpret_cast<const uint4*>(p.key_cache);
  a.value_cache = reinterpret_cast<const uint4*>(p.value_cache);
  a.block_tables = reinterpret_cast<const int32_t*>(p.block_tables);
  a.seq_lens = reinterpret_cast<const int32_t*>(p.seq_lens);
  a.query_start_loc = reinterpret_cast<const int32_t*>(p.query_start_loc);
  a.partials = reinterpret_cast<float*>(p.partials);
  a.arrivals = reinterpret_cast<int32_t*>(p.arrivals);
  a.out_token = p.out_token, a.out_head = p.out_head;
  a.query_token = p.query_token, a.query_head = p.query_head;
  a.block_tables_stride = p.block_tables_stride;
  a.key_strides = strides(p.key_block, p.key_token, p.key_head);
  a.value_strides = strides(p.value_block, p.value_token, p.value_head);
  a.num_seqs = static_cast<int>(p.num_seqs), a.num_tiles = static_cast<int>(p.num_tiles);
  a.num_kv_heads = static_cast<int>(p.num_kv_heads);
  a.group = static_cast<int>(p.num_heads / p.num_kv_heads);
  a.head_dim = static_cast<int>(p.head_dim), a.block_size = static_cast<int>(p.block_size);
  a.window = static_cast<int>(p.window);
  a.scale = static_cast<float>(capped ? p.scale / p.soft_cap : p.scale * kLog2E);
  a.cap = static_cast<float>(p.soft_cap * kLog2E);
  a.fill_splits = static_cast<int>(p.fill_splits);
  a.min_split_keys = static_cast<int>(p.min_split_keys), a.max_split_keys = static_cast<int>(p.max_split_keys);
  a.min_rows = static_cast<int>(p.min_rows), a.max_rows = static_cast<int>(p.max_rows);
  return a;
}

}  // namespace
}  // namespace lamina

extern "C" {

int64_t paged_attention_arguments_size() { return sizeof(PagedAttentionArguments); }

// What a launch of this kind is like on the current device: query rows a block, blocks that the device holds at once,
// floats that a split leaves in the workspace. To be asked once before the first launch, which it makes possible.
int paged_attention_shape(int dtype, int kind, int64_t head_dim, int64_t* rows, int64_t* blocks,
                          int64_t* partial_floats) {
  return lamina::with_shape(dtype, kind, head_dim, [&](auto shape) -> int {
    using S = decltype(shape);
    int device = 0, processors = 0, blocks_each = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = lamina::prepare<S>();
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, lamina::paged_attention_kernel<S>,
                                                            S::kThreads, S::kSharedBytes);
    *rows = S::kRows;
    *blocks = static_cast<int64_t>(processors) * blocks_each;
    *partial_floats = S::kPartialFloats;
    return error;
  });
}

int paged_attention(const PagedAttentionArguments* p) {
  return lamina::with_shape(static_cast<int>(p->dtype), static_cast<int>(p->kind), p->head_dim, [&](auto shape) -> int {
    using S = decltype(shape);
    const auto a = lamina::unpack<S>(*p);
    const dim3 grid(static_cast<unsigned>(a.num_tiles * a.num_kv_heads), static_cast<unsigned>(p->num_splits));
    const auto stream = reinterpret_cast<cudaStream_t>(p->stream);
    lamina::paged_attention_kernel<S><<<grid, S::kThreads, S::kSharedBytes, stream>>>(a);
    return lamina::launch_error();
  });
}

}  // extern "C"
