// The two GEMMs of attention for one warp: sixteen keys at a time against 8 * kTiles query rows.
//
// Both are computed transposed, keys by query rows and then dimensions by query rows, so that eight rows fill an mma
// instruction: decoding has one row a head of the group. A lane holds, of sixteen keys (or dimensions), those at lane /
// 4 and lane / 4 + 8, and of each eight rows the two at lane % 4 * 2.
#pragma once

#include "cuda_mma.cuh"

namespace lamina {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

// On tensor cores: bfloat16 or float16 in, float32 sums.
template <typename T, int kDim, int kTiles>
class WarpMma {
 public:
  static constexpr int kPitch = kDim + 8;   // from row to row in shared memory, padded: 8 rows begin in different banks
  static constexpr int kQueryElements = 0;  // the rows are kept in registers

  template <typename RowOf>
  __device__ __forceinline__ void load_queries(T*, int head_dim, const RowOf& row_of) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const T* row = row_of(8 * n + lane_id() / 4) + lane_id() % 4 * 2;
#pragma unroll
      for (int d = 0; d < kDim; d += 8)
        queries_[d / 16][n][d / 8 % 2] = d < head_dim ? *reinterpret_cast<const uint32_t*>(row + d) : 0;
    }
  }

  // scores = keys @ queries.T, of sixteen rows of keys in shared memory.
  __device__ __forceinline__ void score(float (&scores)[kTiles][4], const T* keys) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    const T* row = keys + lane_id() % 16 * kPitch + lane_id() / 16 * 8;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t left[4];
      load_matrices(left, row + 16 * k);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) multiply_add(scores[n], left, queries_[k][n], T{});
    }
  }

  // out += values.T @ weights, of sixteen rows of values in shared memory.
  __device__ __forceinline__ void accumulate(float (&out)[kDim / 16][kTiles][4], const float (&weights)[kTiles][4],
                                             const T* values) const {
    uint32_t right[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        right[n][half] = transpose_matrix(pack(weights[n][2 * half], weights[n][2 * half + 1], T{}));
    const T* row = values + (lane_id() % 8 + lane_id() / 16 * 8) * kPitch + lane_id() / 8 % 2 * 8;
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
      uint32_t left[4];
      load_transposed_matrices(left, row + 16 * t);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) multiply_add(out[t][n], left, right[n], T{});
    }
  }

 private:
  uint32_t queries_[kDim / 16][kTiles][2];
};

// In float32 throughout, by plain multiply-adds in the same layout: the proof of everything around them.
template <int kDim, int kTiles>
class WarpMma<float, kDim, kTiles> {
 public:
  static constexpr int kPitch = kDim + 4;
  static constexpr int kQueryElements = 8 * kTiles * kPitch;

  template <typename RowOf>
  __device__ __forceinline__ void load_queries(float* memory, int head_dim, const RowOf& row_of) {
    queries_ = memory;
    for (int r = 0; r < 8 * kTiles; ++r)
      for (int d = lane_id() * 4; d < kDim; d += 128)
        *reinterpret_cast<float4*>(memory + r * kPitch + d) =
            d < head_dim ? *reinterpret_cast<const float4*>(row_of(r) + d) : float4{};
    __syncwarp();
  }

  __device__ __forceinline__ void score(float (&scores)[kTiles][4], const float* keys) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    const float* row = keys + lane_id() / 4 * kPitch;
    const float* query = queries_ + lane_id() % 4 * 2 * kPitch;
#pragma unroll 1
    for (int d = 0; d < kDim; d += 4)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores[n][i] += dot(row + i / 2 * 8 * kPitch + d, query + (8 * n + i % 2) * kPitch + d);
  }

  __device__ __forceinline__ void accumulate(float (&out)[kDim / 16][kTiles][4], const float (&weights)[kTiles][4],
                                             const float* values) const {
#pragma unroll
    for (int half = 0; half < 4; half += 2)
#pragma unroll 1
      for (int key = 0; key < 8; ++key) {
        const float* row = values + (4 * half + key) * kPitch + lane_id() / 4;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float weight = __shfl_sync(kAllLanes, weights[n][half + i], 4 * key + lane_id() % 4);
#pragma unroll
            for (int t = 0; t < kDim / 16; ++t) {
              out[t][n][i] = fmaf(weight, row[16 * t], out[t][n][i]);
              out[t][n][i + 2] = fmaf(weight, row[16 * t + 8], out[t][n][i + 2]);
            }
          }
      }
  }

 private:
  static __device__ __forceinline__ float dot(const float* left, const float* right) {
    const float4 a = *reinterpret_cast<const float4*>(left), b = *reinterpret_cast<const float4*>(right);
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
  }

  const float* queries_;
};

}  // namespace lamina
