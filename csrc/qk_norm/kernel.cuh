// Every head of query and key over its root mean square, rounded and times weight, or times 1 + weight and rounded.
#pragma once

#include "kv_cache.cuh"
#include "row_norm.cuh"

namespace lamina {

constexpr int kHeadThreads = 256;

template <typename T>
struct QkNorm {
  Heads<const T> query, key;
  Heads<T> query_out, key_out;
  const T *query_weight, *key_weight;  // [head_dim]
  int64_t num_tokens;
  int head_dim;
  float eps;
};

// `lanes` neighbours, a power of two, take one head, which they read twice: it stays in the first cache.
template <typename T, int kWidth, Weight kWeight>
__global__ void __launch_bounds__(kHeadThreads) qk_norm_kernel(QkNorm<T> norm, int lanes) {
  const int lane = threadIdx.x % lanes, count = norm.query.count + norm.key.count;
  const int64_t head = (static_cast<int64_t>(blockIdx.x) * kHeadThreads + threadIdx.x) / lanes;
  const bool inside = head < norm.num_tokens * count;  // all stay, since they add up together
  const int token = inside ? static_cast<int>(head / count) : 0, index = static_cast<int>(head % count);
  const bool is_query = index < norm.query.count;
  const int own = is_query ? index : index - norm.query.count;
  const T* from = (is_query ? norm.query : norm.key).at(token, own);
  const T* weight = is_query ? norm.query_weight : norm.key_weight;
  T* to = (is_query ? norm.query_out : norm.key_out).at(token, own);
  follow_predecessor();
  float sum = 0.0f;
  for (int i = lane * kWidth; inside && i < norm.head_dim; i += lanes * kWidth) {
    float values[kWidth];
    to_floats(values, load<kWidth>(from + i));
    sum += sum_of_squares(values);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const float factor = rsqrtf(sum / static_cast<float>(norm.head_dim) + norm.eps);
  for (int i = lane * kWidth; inside && i < norm.head_dim; i += lanes * kWidth) {
    float values[kWidth];
    to_floats(values, load<kWidth>(from + i));
    store(to + i, scale<kWeight>(values, load<kWidth>(weight + i), factor));
  }
}

template <Weight kWeight, typename T, int kWidth>
int launch_qk_norm(const QkNorm<T>& norm, cudaStream_t stream) {
  int lanes = kWarp;  // no more than find something to do; by the head's size alone, so that bits do not vary
  while (lanes > 1 && lanes / 2 * kWidth >= norm.head_dim) lanes /= 2;
  const int64_t heads = norm.num_tokens * (norm.query.count + norm.key.count);
  return launch_pdl(qk_norm_kernel<T, kWidth, kWeight>,
                    dim3(static_cast<unsigned>(ceil_div(heads * lanes, kHeadThreads))), dim3(kHeadThreads), stream,
                    norm, lanes);
}

template <Weight kWeight, typename T>
int qk_norm(const QkNorm<T>& norm, cudaStream_t stream) {
  if (norm.num_tokens == 0 || norm.head_dim == 0 || norm.query.count + norm.key.count == 0) return cudaSuccess;
  const bool even = aligned(norm.query.data, norm.key.data, norm.query_out.data, norm.key_out.data, norm.query_weight,
                            norm.key_weight) &&
                    whole_vecs<T>(norm.head_dim, norm.query.token_stride, norm.query.head_stride, norm.key.token_stride,
                                  norm.key.head_stride);
  return even ? launch_qk_norm<kWeight, T, kVecWidth<T>>(norm, stream) : launch_qk_norm<kWeight, T, 1>(norm, stream);
}

}  // namespace lamina
