// Root-mean-square normalisation of rows, alone or of the sum of two rows.
#pragma once

#include "launch.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kWarp = 32, kThreads = 256, kMaxThreads = 512;  // threads a row: wanted, at most

template <typename T>
struct RowNorm {
  const T* x;         // [rows, hidden], rows x_stride apart
  const T* residual;  // like x, rows residual_stride apart; only where two rows are added
  const T* weight;    // [hidden]
  T* out;             // [rows, hidden]
  T* total;           // [rows, hidden], x + residual; only where two rows are added
  int64_t rows, hidden, x_stride, residual_stride;
  float eps;
};

// The sum over all threads of a block of whole warps, the same bits in every thread.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  value = lane < static_cast<int>(blockDim.x / kWarp) ? partial[lane] : 0.0f;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <typename T>
__device__ __forceinline__ float inverse_rms(const RowNorm<T>& norm, float sum_of_squares) {
  return rsqrtf(sum_of_squares / static_cast<float>(norm.hidden) + norm.eps);
}

// The unit vector is rounded before it meets the weight, as the formula has it.
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> scale(const Vec<T, kWidth>& row, const Vec<T, kWidth>& weight, float factor) {
  float values[kWidth], weights[kWidth];
  to_floats(values, row);
  to_floats(weights, weight);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= factor;
  round_to<T>(values);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= weights[i];
  return from_floats<T>(values);
}

template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> add(const Vec<T, kWidth>& row, const Vec<T, kWidth>& residual) {
  float values[kWidth], others[kWidth];
  to_floats(values, row);
  to_floats(others, residual);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] += others[i];
  return from_floats<T>(values);
}

template <typename T, int kWidth>
__device__ __forceinline__ float sum_of_squares(const Vec<T, kWidth>& row) {
  float values[kWidth], sum = 0.0f;
  to_floats(values, row);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += values[i] * values[i];
  return sum;
}

// One block a row, which is read once and stays in registers: kVecs vectors a thread, blockDim.x apart.
template <typename T, int kVecs, bool kAdd>
__global__ void __launch_bounds__(kMaxThreads) norm_rows_in_registers(RowNorm<T> norm) {
  constexpr int kWidth = kVecWidth<T>;
  const int64_t row = blockIdx.x;
  const int vecs = static_cast<int>(norm.hidden / kWidth);
  Vec<T, kWidth> values[kVecs], residual[kVecs], weight[kVecs];
  follow_predecessor();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    values[i] = load<kWidth>(norm.x + row * norm.x_stride + vec * kWidth);
    if (kAdd) residual[i] = load<kWidth>(norm.residual + row * norm.residual_stride + vec * kWidth);
    weight[i] = load<kWidth>(norm.weight + vec * kWidth);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    if (kAdd) {
      values[i] = add(values[i], residual[i]);
      store(norm.total + row * norm.hidden + vec * kWidth, values[i]);
    }
    sum += sum_of_squares(values[i]);
  }
  const float factor = inverse_rms(norm, block_sum(sum));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    keep_packed(values[i]);
    store(norm.out + row * norm.hidden + vec * kWidth, scale(values[i], weight[i], factor));
  }
}

// Any size and any alignment: one element at a time, read twice; each thread reads back only what it wrote.
template <typename T, bool kAdd>
__global__ void __launch_bounds__(kMaxThreads) norm_rows_by_element(RowNorm<T> norm) {
  const int64_t row = blockIdx.x;
  const T* x = norm.x + row * norm.x_stride;
  follow_predecessor();
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < norm.hidden; i += blockDim.x) {
    Vec<T, 1> value = load<1>(x + i);
    if (kAdd) {
      value = add(value, load<1>(norm.residual + row * norm.residual_stride + i));
      store(norm.total + row * norm.hidden + i, value);
    }
    sum += sum_of_squares(value);
  }
  const float factor = inverse_rms(norm, block_sum(sum));
  const T* kept = kAdd ? norm.total + row * norm.hidden : x;
  for (int64_t i = threadIdx.x; i < norm.hidden; i += blockDim.x) {
    store(norm.out + row * norm.hidden + i, scale(load<1>(kept + i), load<1>(norm.weight + i), factor));
  }
}

template <typename T, bool kAdd>
int launch_norm(const RowNorm<T>& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.hidden == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(norm.rows);
  const bool even = aligned(norm.x, norm.residual, norm.weight, norm.out, norm.total) &&
                    whole_vecs<T>(norm.hidden, norm.x_stride, norm.residual_stride);
  // by the row's size alone: a row's bits must not depend on how many others there are
  const int64_t vecs = norm.hidden / kVecWidth<T>, vecs_each = ceil_div(vecs, kThreads);
  const auto threads = [&](int64_t each) { return ceil_div(ceil_div(vecs, each), kWarp) * kWarp; };
  const auto launch = [&](auto kernel, int64_t block) {
    return static_cast<int>(launch_early(kernel, dim3(rows), dim3(static_cast<unsigned>(block)), stream, norm));
  };
  if (!even || threads(4) > kMaxThreads) return launch(norm_rows_by_element<T, kAdd>, kMaxThreads);
  if (vecs_each <= 1) return launch(norm_rows_in_registers<T, 1, kAdd>, threads(1));
  if (vecs_each <= 2) return launch(norm_rows_in_registers<T, 2, kAdd>, threads(2));
  return launch(norm_rows_in_registers<T, 4, kAdd>, threads(4));
}

}  // namespace lamina
