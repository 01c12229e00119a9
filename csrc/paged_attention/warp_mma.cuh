// The two GEMMs of attention for one warp: sixteen keys at a time against 8 * kTiles query rows.
//
// Both are computed transposed, keys by query rows and then dimensions by query rows, so that eight rows fill an mma
// instruction: decoding has one row a head of the group. A lane holds, of sixteen keys (or dimensions), those at lane /
// 4 and lane / 4 + 8, and of each eight rows the two at lane % 4 * 2.
#pragma once

#include "cuda_mma.cuh"
#include "fp8.cuh"
#include "rotary.cuh"
#include "scaled_half.cuh"

namespace lamina {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

// The angles of the one token that all query rows are of, [head_dim / 2] each; or none, where rows are rotated already.
struct Angles {
  const float *cos, *sin;
};
struct NoAngles {};

// Rotates query rows in registers, of which `column` says where those of one of sixteen dimensions, and half, begin.
template <typename T, int kDim, int kTiles, typename Column>
__device__ __forceinline__ void rotate_queries(uint32_t (&queries)[kDim / 16][kTiles][2], const Angles& angles,
                                               const Column& column) {
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 cos = *reinterpret_cast<const float2*>(angles.cos + column(k, half));
      const float2 sin = *reinterpret_cast<const float2*>(angles.sin + column(k, half));
#pragma unroll
      for (int n = 0; n < kTiles; ++n) rotate<T>(queries[k][n][half], queries[k + kDim / 32][n][half], cos, sin);
    }
}

// What weights are multiplied by (as an exponent of 2), as are their sums; which of sixteen dimensions a lane holds:
// that of lane / 4 * kStep, and kNext further; what a column's scores are multiples of.
struct PlainMma {
  static constexpr float kWeightShift = 0.0f;
  static constexpr int kStep = 1, kNext = 8;
  static __device__ __forceinline__ float unit(int, int) { return 1.0f; }
};

// On tensor cores: bfloat16 or float16 in, float32 sums.
template <typename T, typename Cached, int kDim, int kTiles>
class WarpMma : public PlainMma {
  static_assert(sizeof(T) == 2 && sizeof(Cached) == 2, "16 bits");

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

  // After load_queries, before anything else.
  __device__ __forceinline__ void prepare_queries(const NoAngles&) {}
  __device__ __forceinline__ void prepare_queries(const Angles& angles) {
    rotate_queries<T, kDim, kTiles>(queries_, angles,
                                    [](int k, int half) { return 16 * k + 8 * half + lane_id() % 4 * 2; });
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
class WarpMma<float, float, kDim, kTiles> : public PlainMma {
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

  __device__ __forceinline__ void prepare_queries(const NoAngles&) {}

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

// Keys and values in FP8, converted to float16 in registers: two numbers an instruction, where bfloat16 would take
// four. Queries are scaled by powers of 2 so that float16 holds them (a row's largest to 2^14 and more; what is lost is
// below 2^-38 of that), and so are weights, to 2^15. Float16 then holds more of both than bfloat16.
//
// A register of four keys (or of two by two values) makes two operands where they lie: dimensions are summed, or
// numbered, in another order than in memory.
template <typename T, int kDim, int kTiles>
class WarpMma<T, Float8, kDim, kTiles> {
 public:
  static constexpr float kWeightShift = 15.0f;
  static constexpr int kStep = 2, kNext = 1;
  static constexpr int kPitch = kDim + 16;
  static constexpr int kQueryElements = 0;

  __device__ __forceinline__ float unit(int n, int column) const { return units_[n][column]; }

  template <typename RowOf>
  __device__ __forceinline__ void load_queries(T*, int head_dim, const RowOf& row_of) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const T* row = row_of(8 * n + lane_id() / 4) + lane_id() % 4 * 4;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const uint2 four = 16 * k < head_dim ? *reinterpret_cast<const uint2*>(row + 16 * k) : uint2{0, 0};
        queries_[k][n][0] = four.x, queries_[k][n][1] = four.y;
      }
    }
  }

  __device__ __forceinline__ void prepare_queries(const Angles& angles) {
    rotate_queries<T, kDim, kTiles>(queries_, angles,
                                    [](int k, int half) { return 16 * k + lane_id() % 4 * 4 + 2 * half; });
    prepare_queries(NoAngles{});
  }
  __device__ __forceinline__ void prepare_queries(const NoAngles&) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        largest = fmaxf(largest, fmaxf(larger_of<T>(queries_[k][n][0]), larger_of<T>(queries_[k][n][1])));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const PowerOfTwo up = up_to_14(largest);
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) queries_[k][n][half] = scaled_halves<T>(queries_[k][n][half], up.value());
#pragma unroll
      for (int column = 0; column < 2; ++column)
        units_[n][column] = __shfl_sync(kAllLanes, up.inverse(), (lane_id() % 4 * 2 + column) * 4);
    }
  }

  __device__ __forceinline__ void score(float (&scores)[kTiles][4], const Float8* keys) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
    const Float8* row = keys + lane_id() % 16 * kPitch + lane_id() / 16 * 16;
#pragma unroll
    for (int k = 0; k < kDim / 16; k += 2) {
      uint32_t four[4];
      load_matrices(four, row + 16 * k);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        uint32_t left[4];
        fp8_to_halves(left[0], left[2], four[2 * next]);
        fp8_to_halves(left[1], left[3], four[2 * next + 1]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) multiply_add(scores[n], left, queries_[k + next][n], __half{});
      }
    }
  }

  __device__ __forceinline__ void accumulate(float (&out)[kDim / 16][kTiles][4], const float (&weights)[kTiles][4],
                                             const Float8* values) const {
    uint32_t right[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        right[n][half] = transpose_matrix(pack(weights[n][2 * half], weights[n][2 * half + 1], __half{}));
    const Float8* row = values + lane_id() % 16 * kPitch + lane_id() / 16 * 16;
#pragma unroll
    for (int t = 0; t < kDim / 16; t += 2) {
      uint32_t four[4];  // of two keys the same two dimensions
      load_transposed_matrices(four, row + 16 * t);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        uint32_t left[4];
        fp8_to_halves(left[0], left[1], by_dimension(four[2 * next]));
        fp8_to_halves(left[2], left[3], by_dimension(four[2 * next + 1]));
#pragma unroll
        for (int n = 0; n < kTiles; ++n) multiply_add(out[t + next][n], left, right[n], __half{});
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t by_dimension(uint32_t two_by_two) {
    return __byte_perm(two_by_two, 0, 0x3120);
  }

  uint32_t queries_[kDim / 16][kTiles][2];
  float units_[kTiles][2];
};

}  // namespace lamina
