// out = act(gate), rounded, times up, for rows that hold gate and up one after the other.
#pragma once

#include "float_ops.cuh"
#include "launch.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kGateThreads = 256;

// As the caller packs them: 8 bytes each, the stride in elements.
struct GateArguments {
  const void* gate_up;
  void* out;
  int64_t rows, intermediate, stride, dtype;
  cudaStream_t stream;
};

// x / (1 + exp(power)), to be rounded to T.
template <typename T>
__device__ __forceinline__ float over_one_and_exp_of(float x, float power) {
  return sizeof(T) == sizeof(float) ? x / (1.0f + expf(power)) : over_one_and_exp(x, power);
}

template <typename Act, typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> act_and_mul(const Vec<T, kWidth>& gate, const Vec<T, kWidth>& up) {
  float values[kWidth], factors[kWidth];
  to_floats(values, gate);
  to_floats(factors, up);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = Act::template apply<T>(values[i]);
  round_to<T>(values);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= factors[i];
  return from_floats<T>(values);
}

// One vector a thread; a row takes `chunks` blocks.
template <typename Act, typename T, int kWidth>
__global__ void __launch_bounds__(kGateThreads)
    act_and_mul_kernel(const T* gate_up, T* out, int64_t intermediate, int64_t stride, unsigned chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % chunks) * kGateThreads + threadIdx.x) * kWidth;
  follow_predecessor();
  if (column >= intermediate) return;
  const T* from = gate_up + row * stride + column;
  const Vec<T, kWidth> gate = load<kWidth>(from), up = load<kWidth>(from + intermediate);
  store(out + row * intermediate + column, act_and_mul<Act>(gate, up));
}

template <typename Act, typename T, int kWidth>
int launch_act_and_mul(const T* gate_up, T* out, int64_t rows, int64_t intermediate, int64_t stride,
                       cudaStream_t stream) {
  const int64_t chunks = ceil_div(intermediate, kGateThreads * kWidth);
  return launch_pdl(act_and_mul_kernel<Act, T, kWidth>, dim3(static_cast<unsigned>(rows * chunks)), dim3(kGateThreads),
                    stream, gate_up, out, intermediate, stride, static_cast<unsigned>(chunks));
}

// Act::apply<T> maps a float, whose result is rounded to T.
template <typename Act>
int act_and_mul(const GateArguments& p) {
  if (p.rows == 0 || p.intermediate == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* gate_up = static_cast<const T*>(p.gate_up);
    T* out = static_cast<T*>(p.out);
    if (aligned(gate_up, out) && whole_vecs<T>(p.intermediate, p.stride)) {
      return launch_act_and_mul<Act, T, kVecWidth<T>>(gate_up, out, p.rows, p.intermediate, p.stride, p.stream);
    }
    return launch_act_and_mul<Act, T, 1>(gate_up, out, p.rows, p.intermediate, p.stride, p.stream);
  });
}

}  // namespace lamina
