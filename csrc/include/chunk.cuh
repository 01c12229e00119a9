// Chunks of 256 neighbouring logits, each a warp's: which lane holds which, and what is noted of each.
#pragma once

#include "float_ops.cuh"
#include "reduce.cuh"

namespace lamina {

constexpr int kChunk = 256, kEach = kChunk / kWarp;  // logits a chunk, and of it a lane
constexpr float kLargest = 3.402823466e38f;

// Which logit of the chunk a lane's i-th is, where it reads kWidth neighbours at a time.
template <int kWidth>
__device__ __forceinline__ int offset_in_chunk(int i) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  return i / kWidth * kWidth * kWarp + lane * kWidth + i % kWidth;
}

// 1 / temperature, finite so that a gap of 0 stays 0.
__device__ __forceinline__ float sharpness_of(float temperature) { return fminf(__frcp_rn(temperature), kLargest); }

// The largest logit of a chunk, and all summed odds relative to it where tokens are drawn.
__device__ __forceinline__ float2 summary_of(const float (&values)[kEach], float temperature) {
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i) largest = max_or_nan(largest, values[i]);
  largest = combine_warp(largest, max_or_nan);
  float sum = 0.0f;
  if (temperature > 0.0f) {
    const float base = fmaxf(largest, -kLargest);  // -inf - -inf would not be a number
    const float rate = fminf(sharpness_of(temperature) * kLog2E, kLargest);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += exp2_fast((values[i] - base) * rate);
    sum = warp_sum(sum);
  }
  return make_float2(largest, sum);
}

}  // namespace lamina
