// out = silu(gate), rounded, times up, for rows that hold gate and up one after the other.
#pragma once

#include "launch.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kSiluThreads = 256;

// Two units in the last place of a float, which a 16-bit type does not see, buy a third of the instructions.
template <typename T>
__device__ __forceinline__ float divide(float x, float y) {
  return sizeof(T) == sizeof(float) ? x / y : __fdividef(x, y);
}

template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> silu_and_mul(const Vec<T, kWidth>& gate, const Vec<T, kWidth>& up) {
  float values[kWidth], factors[kWidth];
  to_floats(values, gate);
  to_floats(factors, up);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = divide<T>(values[i], 1.0f + expf(-values[i]));
  round_to<T>(values);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= factors[i];
  return from_floats<T>(values);
}

// One vector a thread; a row takes `chunks` blocks.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kSiluThreads)
    silu_and_mul_kernel(const T* gate_up, T* out, int64_t intermediate, int64_t stride, unsigned chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % chunks) * kSiluThreads + threadIdx.x) * kWidth;
  follow_predecessor();
  if (column >= intermediate) return;
  const T* from = gate_up + row * stride + column;
  const Vec<T, kWidth> gate = load<kWidth>(from), up = load<kWidth>(from + intermediate);
  store(out + row * intermediate + column, silu_and_mul(gate, up));
}

template <typename T, int kWidth>
int launch_silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t intermediate, int64_t stride,
                        cudaStream_t stream) {
  const int64_t chunks = ceil_div(intermediate, kSiluThreads * kWidth);
  return launch_early(silu_and_mul_kernel<T, kWidth>, dim3(static_cast<unsigned>(rows * chunks)), dim3(kSiluThreads),
                      stream, gate_up, out, intermediate, stride, static_cast<unsigned>(chunks));
}

template <typename T>
int silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t intermediate, int64_t stride, cudaStream_t stream) {
  if (rows == 0 || intermediate == 0) return cudaSuccess;
  if (aligned(gate_up, out) && whole_vecs<T>(intermediate, stride)) {
    return launch_silu_and_mul<T, kVecWidth<T>>(gate_up, out, rows, intermediate, stride, stream);
  }
  return launch_silu_and_mul<T, 1>(gate_up, out, rows, intermediate, stride, stream);
}

}  // namespace lamina
