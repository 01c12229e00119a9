// Root-mean-square normalisation of rows, alone or of the sum of two rows.
#pragma once

#include "launch.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kWarp = 32;

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

// The sum over all threads of a block of at most 1024, the same bits in every thread.
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
__device__ __forceinline__ void scale(Vec<T, kWidth>& row, const Vec<T, kWidth>& weight, float factor) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float unit = round_to<T>(to_float(row.elements[i]) * factor);
    row.elements[i] = from_float<T>(unit * to_float(weight.elements[i]));
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void add(Vec<T, kWidth>& row, const Vec<T, kWidth>& residual) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    row.elements[i] = from_float<T>(to_float(row.elements[i]) + to_float(residual.elements[i]));
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ float sum_of_squares(const Vec<T, kWidth>& row) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += to_float(row.elements[i]) * to_float(row.elements[i]);
  return sum;
}

// One block a row, which is read once and stays in registers: kVecs vectors a thread, blockDim.x apart.
template <typename T, int kVecs, bool kAdd>
__global__ void __launch_bounds__(512) norm_rows_in_registers(RowNorm<T> norm) {
  constexpr int kWidth = kVecWidth<T>;
  const int64_t row = blockIdx.x;
  const int vecs = static_cast<int>(norm.hidden / kWidth);
  Vec<T, kWidth> values[kVecs], residual[kVecs], weight[kVecs];
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
      add(values[i], residual[i]);
      store(norm.total + row * norm.hidden + vec * kWidth, values[i]);
    }
    sum += sum_of_squares(values[i]);
  }
  const float factor = inverse_rms(norm, block_sum(sum));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    scale(values[i], weight[i], factor);
    store(norm.out + row * norm.hidden + vec * kWidth, values[i]);
  }
}

// Any size and any alignment: one element at a time, read twice; each thread reads back only what it wrote.
template <typename T, bool kAdd>
__global__ void __launch_bounds__(512) norm_rows_by_element(RowNorm<T> norm) {
  const int64_t row = blockIdx.x;
  const T* x = norm.x + row * norm.x_stride;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < norm.hidden; i += blockDim.x) {
    Vec<T, 1> value = load<1>(x + i);
    if (kAdd) {
      add(value, load<1>(norm.residual + row * norm.residual_stride + i));
      store(norm.total + row * norm.hidden + i, value);
    }
    sum += sum_of_squares(value);
  }
  const float factor = inverse_rms(norm, block_sum(sum));
  const T* kept = kAdd ? norm.total + row * norm.hidden : x;
  for (int64_t i = threadIdx.x; i < norm.hidden; i += blockDim.x) {
    Vec<T, 1> value = load<1>(kept + i);
    scale(value, load<1>(norm.weight + i), factor);
    store(norm.out + row * norm.hidden + i, value);
  }
}

// Few rows want all threads at once; many rows want more bytes in flight from each.
inline int64_t norm_threads(int64_t rows) { return rows < 512 ? 512 : 256; }

template <typename T, bool kAdd>
int launch_norm(const RowNorm<T>& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.hidden == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(norm.rows);
  const bool even = aligned(norm.x, norm.residual, norm.weight, norm.out, norm.total) &&
                    whole_vecs<T>(norm.hidden, norm.x_stride, norm.residual_stride);
  const int64_t vecs = norm.hidden / kVecWidth<T>, wanted = ceil_div(vecs, norm_threads(norm.rows));
  const auto threads = [&](int64_t vecs_each) {
    return static_cast<unsigned>(ceil_div(ceil_div(vecs, vecs_each), kWarp) * kWarp);
  };
  if (!even || threads(8) > 512) {
    norm_rows_by_element<T, kAdd><<<rows, 512, 0, stream>>>(norm);
  } else if (wanted <= 1) {
    norm_rows_in_registers<T, 1, kAdd><<<rows, threads(1), 0, stream>>>(norm);
  } else if (wanted <= 2) {
    norm_rows_in_registers<T, 2, kAdd><<<rows, threads(2), 0, stream>>>(norm);
  } else if (wanted <= 4) {
    norm_rows_in_registers<T, 4, kAdd><<<rows, threads(4), 0, stream>>>(norm);
  } else {
    norm_rows_in_registers<T, 8, kAdd><<<rows, threads(8), 0, stream>>>(norm);
  }
  return launch_error();
}

}  // namespace lamina
