// Rotates queries into a tensor of their own and keys straight into the paged cache, and copies values there.
#pragma once

#include "kv_cache.cuh"
#include "rotary.cuh"

namespace lamina {

template <typename T, typename Cached>
struct RotaryAndWrite : CacheScales<Cached> {
  Heads<const T> query, key, value;
  Heads<T> query_out;
  PagedCache<Cached> key_cache, value_cache;
  const float *cos, *sin;  // [num_tokens, half]
  const int32_t* slots;    // [num_tokens]; below 0: a padding row, of which only the query is written
  int num_tokens, half, block_size;
};

// One block a token; its heads in a row are those of the query, of the key, of the value.
template <typename T, typename Cached, int kWidth>
__global__ void __launch_bounds__(kRotaryThreads) rotary_and_write_kernel(RotaryAndWrite<T, Cached> args) {
  const int token = blockIdx.x, num_heads = args.query.count, num_kv_heads = args.key.count;
  follow_predecessor();
  const int slot = args.slots[token];
  const int heads = slot < 0 ? num_heads : num_heads + 2 * num_kv_heads;
  for (int column = threadIdx.x * kWidth; column < args.half; column += blockDim.x * kWidth) {
    float cos[kWidth], sin[kWidth];
    load_floats(cos, args.cos + static_cast<int64_t>(token) * args.half + column);
    load_floats(sin, args.sin + static_cast<int64_t>(token) * args.half + column);
    for (int head = threadIdx.y; head < heads; head += blockDim.y) {
      if (head < num_heads) {
        move_pair<true>(args.query.at(token, head) + column, args.query_out.at(token, head) + column, args.half, cos,
                        sin);
        continue;
      }
      const bool is_key = head < num_heads + num_kv_heads;
      const int own = head - num_heads - (is_key ? 0 : num_kv_heads);
      Cached* to = (is_key ? args.key_cache : args.value_cache).at(slot, args.block_size, own) + column;
      if (is_key) {
        move_pair<true>(args.key.at(token, own) + column, to, args.half, cos, sin, args.key_scale);
      } else {
        move_pair<false>(args.value.at(token, own) + column, to, args.half, cos, sin, args.value_scale);
      }
    }
  }
}

template <int kWidth, typename T, typename Cached>
int launch_rotary_and_write(const RotaryAndWrite<T, Cached>& args, cudaStream_t stream) {
  const dim3 block = heads_block(args.half / kWidth, args.query.count + 2 * args.key.count, kRotaryThreads);
  return launch_pdl(rotary_and_write_kernel<T, Cached, kWidth>, dim3(static_cast<unsigned>(args.num_tokens)), block,
                    stream, args);
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
  return even ? launch_rotary_and_write<kVecWidth<T>>(args, stream) : launch_rotary_and_write<1>(args, stream);
}

}  // namespace lamina
