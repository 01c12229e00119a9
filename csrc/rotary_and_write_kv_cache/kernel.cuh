// Rotates queries into a tensor of their own and keys straight into the paged cache, and copies values there.
#pragma once

#include "kv_cache.cuh"
#include "rotary.cuh"

namespace lamina {

constexpr int kManyTokens = 1024;  // of so many a block takes two, so that a thread waits once for the vectors of both

template <typename T, typename Cached>
struct RotaryAndWrite : CacheScales<Cached> {
  Heads<const T> query, key, value;
  Heads<T> query_out;
  PagedCache<Cached> key_cache, value_cache;
  const float *cos, *sin;  // [num_tokens, half]
  const int32_t* slots;    // [num_tokens]; below 0: a padding row, of which only the query is written
  int num_tokens, half, block_size;
};

// Both halves of a head of one token at one place, in registers.
template <typename T, typename Cached, int kWidth>
class MovingPair {
  using Args = RotaryAndWrite<T, Cached>;

 public:
  // Heads in a row are those of the query, of the key, of the value.
  __device__ __forceinline__ void load_from(const Args& args, int token, int head, int column) {
    const int num_heads = args.query.count, num_kv_heads = args.key.count;
    kind_ = (head >= num_heads) + (head >= num_heads + num_kv_heads);
    own_ = head - (kind_ > 0 ? num_heads : 0) - (kind_ > 1 ? num_kv_heads : 0);
    const T* from = (kind_ == 0 ? args.query : kind_ == 1 ? args.key : args.value).at(token, own_) + column;
    first_ = load<kWidth>(from), second_ = load<kWidth>(from + args.half);
  }

  __device__ __forceinline__ void rotate_unless_value(const Args& args, int token, int column) {
    if (kind_ == 2) return;
    float cos[kWidth], sin[kWidth];
    load_floats(cos, args.cos + static_cast<int64_t>(token) * args.half + column);
    load_floats(sin, args.sin + static_cast<int64_t>(token) * args.half + column);
    rotate(first_, second_, cos, sin);
  }

  // Keys and values where the token has a slot.
  __device__ __forceinline__ void store_to(const Args& args, int token, int slot, int column) const {
    if (kind_ == 0) return put(args.query_out.at(token, own_) + column, args.half, 1.0f);
    if (slot < 0) return;
    const bool is_key = kind_ == 1;
    Cached* to = (is_key ? args.key_cache : args.value_cache).at(slot, args.block_size, own_) + column;
    put(to, args.half, is_key ? args.key_scale : args.value_scale);
  }

 private:
  template <typename To>
  __device__ __forceinline__ void put(To* to, int half, float scale) const {
    store_cached(to, first_, scale);
    store_cached(to + half, second_, scale);
  }

  int kind_, own_;
  Vec<T, kWidth> first_, second_;
};

// A block for every kTokens tokens; a thread has a place in some heads of each.
template <typename T, typename Cached, int kWidth, int kTokens>
__global__ void __launch_bounds__(kRotaryThreads) rotary_and_write_kernel(RotaryAndWrite<T, Cached> args) {
  const int heads = args.query.count + 2 * args.key.count, first = static_cast<int>(blockIdx.x) * kTokens;
  const int tokens = min(kTokens, args.num_tokens - first);
  follow_predecessor();
  for (int column = threadIdx.x * kWidth; column < args.half; column += blockDim.x * kWidth) {
    for (int head = threadIdx.y; head < heads; head += blockDim.y) {
      MovingPair<T, Cached, kWidth> pairs[kTokens];
      int slots[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (i < tokens) pairs[i].load_from(args, first + i, head, column), slots[i] = args.slots[first + i];
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (i < tokens) pairs[i].rotate_unless_value(args, first + i, column);
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (i < tokens) pairs[i].store_to(args, first + i, slots[i], column);
    }
  }
}

template <int kWidth, int kTokens, typename T, typename Cached>
int launch_rotary_and_write(const RotaryAndWrite<T, Cached>& args, cudaStream_t stream) {
  const dim3 block = heads_block(args.half / kWidth, args.query.count + 2 * args.key.count, kRotaryThreads);
  return launch_pdl(rotary_and_write_kernel<T, Cached, kWidth, kTokens>,
                    dim3(static_cast<unsigned>(ceil_div(args.num_tokens, kTokens))), block, stream, args);
}

template <typename T>
bool even_strides(const Heads<const T>& heads) {
  return aligned(heads.data) && whole_vecs<T>(heads.token_stride, heads.head_stride);
}

template <typename T, typename Cached>
bool even_strides(const PagedCache<Cached>& cache) {
  return aligned(cache.data) && whole_vecs<T>(cache.block_stride, cache.token_stride, cache.head_stride);
}

template <typename T, typename Cached>
int rotary_and_write_kv_cache(const RotaryAndWrite<T, Cached>& args, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.half == 0 || args.query.count + args.key.count == 0) return cudaSuccess;
  const bool even = even_strides(args.query) && even_strides(args.key) && even_strides(args.value) &&
                    even_strides<T>(args.key_cache) && even_strides<T>(args.value_cache) && whole_vecs<T>(args.half) &&
                    aligned(args.query_out.data, args.cos, args.sin);
  if (!even) return launch_rotary_and_write<1, 1>(args, stream);
  return args.num_tokens < kManyTokens ? launch_rotary_and_write<kVecWidth<T>, 1>(args, stream)
                                       : launch_rotary_and_write<kVecWidth<T>, 2>(args, stream);
}

}  // namespace lamina
