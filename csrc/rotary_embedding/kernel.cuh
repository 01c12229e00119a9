// (x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves x1, x2 of every head of query and key.
#pragma once

#include "rotary.cuh"

namespace lamina {

template <typename T>
struct RotaryEmbedding {
  Heads<const T> query, key;
  Heads<T> query_out, key_out;
  const float *cos, *sin;  // [num_tokens, half]
  int num_tokens, half;
};

// One block a token; a thread keeps its column, and so its angles, from head to head.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kRotaryThreads) rotary_embedding_kernel(RotaryEmbedding<T> rotary) {
  const int token = blockIdx.x;
  follow_predecessor();
  for (int column = threadIdx.x * kWidth; column < rotary.half; column += blockDim.x * kWidth) {
    float cos[kWidth], sin[kWidth];
    load_floats(cos, rotary.cos + static_cast<int64_t>(token) * rotary.half + column);
    load_floats(sin, rotary.sin + static_cast<int64_t>(token) * rotary.half + column);
    for (int head = threadIdx.y; head < rotary.query.count + rotary.key.count; head += blockDim.y) {
      const bool is_query = head < rotary.query.count;
      const int own = is_query ? head : head - rotary.query.count;
      const T* from = (is_query ? rotary.query : rotary.key).at(token, own) + column;
      T* to = (is_query ? rotary.query_out : rotary.key_out).at(token, own) + column;
      move_rotated(from, to, rotary.half, cos, sin);
    }
  }
}

template <typename T, int kWidth>
int launch_rotary_embedding(const RotaryEmbedding<T>& rotary, cudaStream_t stream) {
  const dim3 block = heads_block(rotary.half / kWidth, rotary.query.count + rotary.key.count, kRotaryThreads);
  return launch_pdl(rotary_embedding_kernel<T, kWidth>, dim3(static_cast<unsigned>(rotary.num_tokens)), block, stream,
                    rotary);
}

template <typename T>
int rotary_embedding(const RotaryEmbedding<T>& rotary, cudaStream_t stream) {
  if (rotary.num_tokens == 0 || rotary.half == 0 || rotary.query.count + rotary.key.count == 0) return cudaSuccess;
  const bool even =
      aligned(rotary.query.data, rotary.key.data, rotary.query_out.data, rotary.key_out.data, rotary.cos, rotary.sin) &&
      whole_vecs<T>(rotary.half, rotary.query.token_stride, rotary.query.head_stride, rotary.key.token_stride,
                    rotary.key.head_stride);
  return even ? launch_rotary_embedding<T, kVecWidth<T>>(rotary, stream)
              : launch_rotary_embedding<T, 1>(rotary, stream);
}

}  // namespace lamina
