// Root-mean-square normalisation of rows, alone or of the sum of two rows.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "pdl.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kMaxThreads = 512;  // of a row: as many as it has vectors, up to here

// What is normed: x itself, the sum of x and residual rounded to T, or that sum as float has it.
enum class Sum { kNone, kRounded, kUnrounded };
// How the unit vector meets the weight: rounded to T, then times w; or as it is, times 1 + w.
enum class Weight { kPlain, kZeroCentred };

// As the callers pack them: 8 bytes each, strides in elements.
struct NormArguments {
  const void *x, *weight;
  void* out;
  int64_t rows, hidden, x_stride;
  double eps;
  int64_t dtype;
  cudaStream_t stream;
};

struct SumAndNormArguments {
  const void *x, *residual, *weight;
  void *out, *total;
  int64_t rows, hidden, x_stride, residual_stride;
  double eps;
  int64_t unrounded, dtype;
  cudaStream_t stream;
};

template <typename T>
struct RowNorm {
  const T* x;         // [rows, hidden], rows x_stride apart
  const T* residual;  // like x, rows residual_stride apart; only where two rows are added, as total
  const T* weight;    // [hidden]
  T* out;             // [rows, hidden]
  T* total;           // [rows, hidden], x + residual rounded
  int64_t rows, hidden, x_stride, residual_stride;
  float eps;
};

// The sum over all threads of a block of whole warps, the same bits in every thread.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[kWarp];
  return combine_warps(value, partial, static_cast<int>(blockDim.x / kWarp), 0.0f,
                       [](float a, float b) { return a + b; });
}

template <typename T>
__device__ __forceinline__ float inverse_rms(const RowNorm<T>& norm, float sum_of_squares) {
  return rsqrtf(sum_of_squares / static_cast<float>(norm.hidden) + norm.eps);
}

template <Weight kWeight, typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> scale(float (&values)[kWidth], const Vec<T, kWidth>& weight, float factor) {
  float weights[kWidth];
  to_floats(weights, weight);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= factor;
  if (kWeight == Weight::kPlain) round_to<T>(values);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= kWeight == Weight::kPlain ? weights[i] : 1.0f + weights[i];
  return from_floats<T>(values);
}

// What is normed, of a row and, but where that is the sum already, the residual.
template <Sum kSum, typename T, int kWidth>
__device__ __forceinline__ void normed_floats(float (&values)[kWidth], const Vec<T, kWidth>& row,
                                              const Vec<T, kWidth>& residual) {
  to_floats(values, row);
  if (kSum == Sum::kUnrounded) {
    float others[kWidth];
    to_floats(others, residual);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] += others[i];
  }
}

template <int kWidth>
__device__ __forceinline__ float sum_of_squares(const float (&values)[kWidth]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += values[i] * values[i];
  return sum;
}

template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> add(const Vec<T, kWidth>& row, const Vec<T, kWidth>& residual) {
  float values[kWidth];
  normed_floats<Sum::kUnrounded>(values, row, residual);
  return from_floats<T>(values);
}

// A row that a block holds in registers, kVecs vectors a thread, blockDim.x apart. The results are handed on as
// take(i, vec, result), i of kVecs. Where it does not count, nothing is written.
template <int kVecs, Sum kSum, Weight kWeight, typename T, typename Take>
__device__ __forceinline__ void norm_held_row(const RowNorm<T>& norm, int64_t row,
                                              Vec<T, kVecWidth<T>> (&values)[kVecs],
                                              Vec<T, kVecWidth<T>> (&residual)[kVecs],
                                              const Vec<T, kVecWidth<T>> (&weight)[kVecs], bool counts,
                                              const Take& take) {
  constexpr int kWidth = kVecWidth<T>;
  const int vecs = static_cast<int>(norm.hidden / kWidth);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    if (kSum != Sum::kNone) {
      Vec<T, kWidth> total = add(values[i], residual[i]);
      keep_packed(total);  // computed where it does not count, too
      if (counts) store(norm.total + row * norm.hidden + vec * kWidth, total);
      if (kSum == Sum::kRounded) values[i] = total;
    }
    float floats[kWidth];
    normed_floats<kSum>(floats, values[i], residual[i]);
    sum += sum_of_squares(floats);
  }
  const float factor = inverse_rms(norm, block_sum(sum));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    keep_packed(values[i]);
    if (kSum == Sum::kUnrounded) keep_packed(residual[i]);
    float floats[kWidth];
    normed_floats<kSum>(floats, values[i], residual[i]);
    take(i, vec, scale<kWeight>(floats, weight[i], factor));
  }
}

// What a thread holds of the weights. No step writes them, and behind the next GEMM's they would wait in line.
template <int kVecs, typename T>
__device__ __forceinline__ void load_weights(const RowNorm<T>& norm, Vec<T, kVecWidth<T>> (&weight)[kVecs]) {
  const int vecs = static_cast<int>(norm.hidden / kVecWidth<T>);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < vecs) weight[i] = load<kVecWidth<T>>(norm.weight + vec * kVecWidth<T>);
  }
}

// One block a row, which is read once, behind the kernel ahead; the results are handed on as norm_held_row does.
template <int kVecs, Sum kSum, Weight kWeight, typename T, typename Take>
__device__ __forceinline__ void norm_row(const RowNorm<T>& norm, const Vec<T, kVecWidth<T>> (&weight)[kVecs],
                                         bool counts, const Take& take) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr bool kAdd = kSum != Sum::kNone;
  const int64_t row = blockIdx.x;
  const int vecs = static_cast<int>(norm.hidden / kWidth);
  const T* const x = counts ? norm.x + row * norm.x_stride : norm.weight;
  const T* const others = counts ? norm.residual + row * norm.residual_stride : norm.weight;
  Vec<T, kWidth> values[kVecs], residual[kVecs];
  if (counts) wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= vecs) continue;
    values[i] = load<kWidth>(x + vec * kWidth);
    if (kAdd) residual[i] = load<kWidth>(others + vec * kWidth);
  }
  norm_held_row<kVecs, kSum, kWeight>(norm, row, values, residual, weight, counts, take);
}

template <typename T, int kVecs, Sum kSum, Weight kWeight>
__global__ void __launch_bounds__(kMaxThreads) norm_rows_in_registers(RowNorm<T> norm) {
  Vec<T, kVecWidth<T>> weight[kVecs];
  T* out = norm.out + blockIdx.x * norm.hidden;
  start_successor();
  load_weights(norm, weight);
  rehearse([&](bool counts) {
    norm_row<kVecs, kSum, kWeight>(norm, weight, counts, [&](int, int vec, Vec<T, kVecWidth<T>> result) {
      keep_packed(result);
      if (counts) store(out + vec * kVecWidth<T>, result);
    });
    __syncthreads();  // what a block adds up lies where the last sum lay
  });
}

// Any size and any alignment: one element at a time, read twice; each thread reads back only what it wrote.
template <typename T, Sum kSum, Weight kWeight>
__global__ void __launch_bounds__(kMaxThreads) norm_rows_by_element(RowNorm<T> norm) {
  const int64_t row = blockIdx.x;
  const T* x = norm.x + row * norm.x_stride;
  const T* residual = kSum == Sum::kNone ? x : norm.residual + row * norm.residual_stride;
  follow_predecessor();
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < norm.hidden; i += blockDim.x) {
    Vec<T, 1> value = load<1>(x + i);
    const Vec<T, 1> other = load<1>(residual + i);
    if (kSum != Sum::kNone) {
      const Vec<T, 1> total = add(value, other);
      store(norm.total + row * norm.hidden + i, total);
      if (kSum == Sum::kRounded) value = total;
    }
    float floats[1];
    normed_floats<kSum>(floats, value, other);
    sum += sum_of_squares(floats);
  }
  const float factor = inverse_rms(norm, block_sum(sum));
  const T* kept = kSum == Sum::kRounded ? norm.total + row * norm.hidden : x;
  for (int64_t i = threadIdx.x; i < norm.hidden; i += blockDim.x) {
    float floats[1];
    normed_floats<kSum>(floats, load<1>(kept + i), load<1>(residual + i));
    store(norm.out + row * norm.hidden + i, scale<kWeight>(floats, load<1>(norm.weight + i), factor));
  }
}

// Whether a block holds a row of so many vectors in its registers.
inline bool block_holds(int64_t vecs) { return ceil_div(vecs, 4) <= kMaxThreads; }

// Calls launch(vectors a thread, threads) for such a row: by its size alone, since a row's bits must not depend on how
// many others there are.
template <typename Launch>
int with_held_row(int64_t vecs, const Launch& launch) {
  const int64_t wanted = ceil_div(vecs, kMaxThreads);
  const auto call = [&](auto each) { return launch(each, ceil_div(ceil_div(vecs, each.value), kWarp) * kWarp); };
  if (wanted <= 1) return call(std::integral_constant<int, 1>{});
  if (wanted <= 2) return call(std::integral_constant<int, 2>{});
  return call(std::integral_constant<int, 4>{});
}

template <Sum kSum, Weight kWeight, typename T>
int launch_norm(const RowNorm<T>& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.hidden == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(norm.rows);
  const bool even = aligned(norm.x, norm.residual, norm.weight, norm.out, norm.total) &&
                    whole_vecs<T>(norm.hidden, norm.x_stride, norm.residual_stride);
  const int64_t vecs = norm.hidden / kVecWidth<T>;
  const auto launch = [&](auto kernel, int64_t block) {
    return static_cast<int>(launch_pdl(kernel, dim3(rows), dim3(static_cast<unsigned>(block)), stream, norm));
  };
  if (!even || !block_holds(vecs)) return launch(norm_rows_by_element<T, kSum, kWeight>, kMaxThreads);
  return with_held_row(vecs, [&](auto each, int64_t threads) {
    return launch(norm_rows_in_registers<T, each.value, kSum, kWeight>, threads);
  });
}

template <Weight kWeight>
int norm_rows(const NormArguments& p) {
  return with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const RowNorm<T> norm{static_cast<const T*>(p.x),
                          nullptr,
                          static_cast<const T*>(p.weight),
                          static_cast<T*>(p.out),
                          nullptr,
                          p.rows,
                          p.hidden,
                          p.x_stride,
                          0,
                          static_cast<float>(p.eps)};
    return launch_norm<Sum::kNone, kWeight>(norm, p.stream);
  });
}

template <Weight kWeight>
int add_and_norm_rows(const SumAndNormArguments& p) {
  return with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const RowNorm<T> norm{static_cast<const T*>(p.x),
                          static_cast<const T*>(p.residual),
                          static_cast<const T*>(p.weight),
                          static_cast<T*>(p.out),
                          static_cast<T*>(p.total),
                          p.rows,
                          p.hidden,
                          p.x_stride,
                          p.residual_stride,
                          static_cast<float>(p.eps)};
    return p.unrounded ? launch_norm<Sum::kUnrounded, kWeight>(norm, p.stream)
                       : launch_norm<Sum::kRounded, kWeight>(norm, p.stream);
  });
}

}  // namespace lamina
