// out = silu(gate), rounded, times up, for rows that hold gate and up one after the other.
#pragma once

#include "launch.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kSiluThreads = 256;

template <typename T>
__device__ __forceinline__ T silu_and_mul_element(T gate, T up) {
  const float x = to_float(gate);
  const float silu = round_to<T>(x / (1.0f + expf(-x)));
  return from_float<T>(silu * to_float(up));
}

// One vector a thread; a row takes `chunks` blocks.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kSiluThreads)
    silu_and_mul_kernel(const T* __restrict__ gate_up, T* __restrict__ out, int64_t intermediate, int64_t stride,
                        unsigned chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % chunks) * kSiluThreads + threadIdx.x) * kWidth;
  if (column >= intermediate) return;
  const T* from = gate_up + row * stride + column;
  Vec<T, kWidth> gate = load<kWidth>(from);
  const Vec<T, kWidth> up = load<kWidth>(from + intermediate);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gate.elements[i] = silu_and_mul_element(gate.elements[i], up.elements[i]);
  store(out + row * intermediate + column, gate);
}

template <typename T, int kWidth>
int launch_silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t intermediate, int64_t stride,
                        cudaStream_t stream) {
  const int64_t chunks = ceil_div(intermediate, kSiluThreads * kWidth);
  silu_and_mul_kernel<T, kWidth><<<static_cast<unsigned>(rows * chunks), kSiluThreads, 0, stream>>>(
      gate_up, out, intermediate, stride, static_cast<unsigned>(chunks));
  return launch_error();
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
