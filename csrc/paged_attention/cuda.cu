// The C interface of paged attention on CUDA.
#include "hopper_launch.cuh"
#include "query_launch.cuh"

namespace lamina {
namespace {

// What keys and values of queries of type T are stored in.
#if defined(LAMINA_FP8_CACHE)
template <typename T>
using Cached = Float8;
#else
template <typename T>
using Cached = T;
#endif

// Whether kernels rotate, and what they are then packed in.
#if defined(LAMINA_ROTATES)
constexpr bool kRotates = true;
using Arguments = RotatingAttentionArguments;
const PagedAttentionArguments& attention_of(const Arguments& p) { return p.attention; }
#else
constexpr bool kRotates = false;
using Arguments = PagedAttentionArguments;
const PagedAttentionArguments& attention_of(const Arguments& p) { return p; }
#endif

template <typename T, int kind, typename Function>
int with_dim(int64_t head_dim, const Function& function) {
  using C = Cached<T>;
  if constexpr (kRotates) {
    if (head_dim == 64) return function(Shape<T, C, 64, kind, true>{});
    if (head_dim == 128) return function(Shape<T, C, 128, kind, true>{});
  } else {
    if (head_dim <= 64) return function(Shape<T, C, 64, kind>{});
    if (sizeof(T) == 2 && head_dim <= 96) return function(Shape<T, C, sizeof(T) == 2 ? 96 : 128, kind>{});
    if (head_dim <= 128) return function(Shape<T, C, 128, kind>{});
    if (head_dim <= 256) return function(Shape<T, C, 256, kind>{});
  }
  return cudaErrorInvalidValue;
}

template <typename T, typename Function>
int with_hopper_dim(int64_t head_dim, const Function& function) {
  if constexpr (sizeof(T) == 2) {
    if (head_dim == 64) return function(HopperShape<T, Cached<T>, 64>{});
    if (head_dim == 128) return function(HopperShape<T, Cached<T>, 128>{});
  }
  return cudaErrorInvalidValue;
}

// Calls function with the Shape of a kernel.
template <typename Function>
int with_shape(int dtype, int kind, int64_t head_dim, const Function& function) {
  return with_dtype(dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    if constexpr (sizeof(T) > 2 && (sizeof(Cached<T>) == 1 || kRotates)) {
      return cudaErrorInvalidValue;
    } else if constexpr (kRotates) {
      if (kind == 0) return with_dim<T, 0>(head_dim, function);
      if (kind == 1) return with_dim<T, 1>(head_dim, function);
      return cudaErrorInvalidValue;
    } else {
      switch (kind) {
        case 0:
          return with_dim<T, 0>(head_dim, function);
        case 1:
          return with_dim<T, 1>(head_dim, function);
        case 2:
          return with_dim<T, 2>(head_dim, function);
        case 3:
          return with_hopper_dim<T>(head_dim, function);
        default:
          return cudaErrorInvalidValue;
      }
    }
  });
}

template <typename T, typename C, int dim, int kind, bool rotates>
auto kernel_of(Shape<T, C, dim, kind, rotates> shape) {
  return paged_attention_kernel<decltype(shape)>;
}

template <typename T, typename C, int dim>
auto kernel_of(HopperShape<T, C, dim>) {
  return hopper_attention_kernel<HopperShape<T, C, dim>>;
}

template <typename T, typename C, int dim, int kind, bool rotates>
int launch(Shape<T, C, dim, kind, rotates> shape, const Arguments& p) {
  using S = decltype(shape);
  const auto a = unpack<typename S::Call>(p);
  const dim3 grid(static_cast<unsigned>(a.num_tiles * a.num_kv_heads * a.fill_splits + a.num_extra));
  return launch_clusters_pdl(1, paged_attention_kernel<S>, grid, S::kThreads, S::kSharedBytes,
                             reinterpret_cast<cudaStream_t>(p.stream), a);
}

template <typename T, typename C, int dim>
int launch(HopperShape<T, C, dim> shape, const PagedAttentionArguments& p) {
  using S = decltype(shape);
  typename S::Parameters a;
  a.call = unpack<typename S::Call>(p);
  const cudaError_t error = prepare<S>(p, a);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(smaller(p.device_blocks, p.num_tiles * p.num_kv_heads * p.num_splits));
  return launch_clusters_pdl(1, hopper_attention_kernel<S>, blocks, S::kThreads, S::kSharedBytes,
                             reinterpret_cast<cudaStream_t>(p.stream), a);
}

}  // namespace
}  // namespace lamina

extern "C" {

int64_t paged_attention_arguments_size() { return sizeof(lamina::Arguments); }

// What a launch of this kind is like on the current device: query rows a block, blocks that the device holds at once,
// floats that a split leaves in the workspace. To be asked once before the first launch, which it makes possible.
int paged_attention_shape(int dtype, int kind, int64_t head_dim, int64_t* rows, int64_t* blocks,
                          int64_t* partial_floats) {
  return lamina::with_shape(dtype, kind, head_dim, [&](auto shape) -> int {
    using S = decltype(shape);
    return lamina::query_launch<S>(lamina::kernel_of(shape), rows, blocks, partial_floats);
  });
}

int paged_attention(const lamina::Arguments* p) {
  const PagedAttentionArguments& call = lamina::attention_of(*p);
  return lamina::with_shape(static_cast<int>(call.dtype), static_cast<int>(call.kind), call.head_dim,
                            [&](auto shape) -> int { return lamina::launch(shape, *p); });
}

}  // extern "C"
