// Online softmax of one consumer warpgroup on Hopper: scores, running maximum and sum, probabilities, output
// accumulators.
#pragma once

#include "fixed_splits.cuh"
#include "hopper_shape.cuh"
#include "quad_transpose.cuh"

namespace lamina {

constexpr float kSlack = 8.0f;  // probabilities grow to 2^kSlack before the accumulators are rescaled

// In the accumulator layout of WGMMA: lane 4 * r + c has rows r and r + 8 of its warp's sixteen, and of every eight
// columns 2 * c and the next.
template <typename S>
struct HopperSoftmax {
  using T = typename S::T;
  using Math = typename S::Math;
  static constexpr int kScales = S::kConverts ? 2 : 1;
  float scores[S::kKeys / 2];
  uint32_t weights[S::kKeys / 4];
  float out[S::kDim / 2];
  uint32_t query[S::kQueryInRegisters ? S::kDim / 4 : 1];
  float max[2], base[2], sum[2];  // of scores; what probabilities are relative to; of probabilities
  int first;                      // position of the tile's first row
  int token[2];                   // of the lane's rows, counted from that
  float scale[kScales];           // of scores; of rows that were scaled each its own

  __device__ __forceinline__ HopperSoftmax(const typename S::Call& a, int warpgroup)
      : scale{a.scale}, row_(warpgroup * 64 + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {
    for (int half = 0; half < 2; ++half) token[half] = row(half) / a.group;
  }

  __device__ __forceinline__ void begin(const WorkTile& work) {
    first = work.first;
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < S::kDim / 2; ++i) out[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) max[half] = -INFINITY, sum[half] = 0.0f;
  }

  // Loads the queries of the warp's rows from panels into registers, as left operands.
  __device__ __forceinline__ void load_queries(const T* panels) {
    const int r = lane_id() % 16, unit = lane_id() / 16;
    const T* from = panels + (row_ + r) * kPanelColumns;
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k)
      load_matrices(reinterpret_cast<uint32_t (&)[4]>(query[4 * k]),
                    from + k / 4 * S::kRows * kPanelColumns + ((k % 4 * 2 + unit) ^ r % 8) * 8);
  }

  // Loads the same from device memory; rows past the last are zeros.
  __device__ __forceinline__ void load_queries(const typename S::Call& a, const WorkTile& work) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half);
      const T* from = a.query + (work.start + token[half]) * a.query_token +
                      (work.kv_head * a.group + r - token[half] * a.group) * a.query_head + lane_id() % 4 * 2;
#pragma unroll
      for (int k = 0; k < S::kDim / 16; ++k)
#pragma unroll
        for (int unit = 0; unit < 2; ++unit)
          query[4 * k + 2 * unit + half] =
              r < work.rows ? *reinterpret_cast<const uint32_t*>(from + 16 * k + 8 * unit) : 0;
    }
  }

  // Rotates the loaded queries, all of one token, by its angles [kDim / 2].
  __device__ __forceinline__ void rotate_queries(const float* cos, const float* sin) {
#pragma unroll
    for (int k = 0; k < S::kDim / 32; ++k)
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const int column = 16 * k + 8 * unit + lane_id() % 4 * 2;
        const float2 of_cos = *reinterpret_cast<const float2*>(cos + column);
        const float2 of_sin = *reinterpret_cast<const float2*>(sin + column);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          rotate<T>(query[4 * k + 2 * unit + half], query[4 * (k + S::kDim / 32) + 2 * unit + half], of_cos, of_sin);
      }
  }

  // The loaded queries to float16, each row multiplied by a power of 2, which its scores are divided by.
  __device__ __forceinline__ void scale_queries(float score_scale) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < S::kDim / 4; ++i) largest[i % 2] = fmaxf(largest[i % 2], larger_of<T>(query[i]));
    PowerOfTwo up[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], 2));
      up[half] = up_to_14(largest[half]);
      scale[half] = score_scale * up[half].inverse();
    }
#pragma unroll
    for (int i = 0; i < S::kDim / 4; ++i) query[i] = scaled_halves<T>(query[i], up[i % 2].value());
  }

  // Raises the running maxima to those of the scores, or leaves them where the scores exceed them by kSlack at most.
  // Returns the factors by which what was accumulated before must be rescaled.
  template <bool is_masked>
  __device__ __forceinline__ float2 update_max(const typename S::Call& a, int first_key) {
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_masked) {
        const int first_column = first_key + lane_id() % 4 * 2, position = first + token[half];
        mask(half, a.oldest(position) - first_column, position - first_column);
      }
      float tops[4] = {max[half], -INFINITY, -INFINITY, -INFINITY};  // independent, since each waits for its last
#pragma unroll
      for (int i = 2 * half, j = 0; i < S::kKeys / 2; i += 4, j ^= 2) {
        tops[j] = fmaxf(tops[j], scores[i]);
        tops[j + 1] = fmaxf(tops[j + 1], scores[i + 1]);
      }
      float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      if ((top - max[half]) * scale_of(half) <= kSlack) top = max[half];
      const float scaled = __fmul_rn(top, scale_of(half));  // rounded in whatever the compiler makes of the loops
      base[half] = is_masked && top == -INFINITY ? 0.0f : scaled;  // no key yet: probabilities of 0, not of NaN
      // Exactly 1 where the maximum stays: tiles without a visible key must leave no trace, however many there are.
      keep[half] = top == max[half] ? 1.0f : exp2_fast(fmaf(max[half], scale_of(half), -base[half]));
      max[half] = top;
    }
    return float2{keep[0], keep[1]};
  }

  // Scores of half of the lane's rows to probabilities relative to their maximum, which are still to be packed.
  __device__ __forceinline__ void exponentiate(int half) {
    float totals[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float from = base[half] - S::kWeightShift;
#pragma unroll
    for (int i = 2 * half, j = 0; i < S::kKeys / 2; i += 4, j ^= 2) {
      scores[i] = exp2_fast(fmaf(scores[i], scale_of(half), -from));
      scores[i + 1] = exp2_fast(fmaf(scores[i + 1], scale_of(half), -from));
      totals[j] += scores[i];
      totals[j + 1] += scores[i + 1];
    }
    sum[half] += (totals[0] + totals[1]) + (totals[2] + totals[3]);
  }

  __device__ __forceinline__ void mask(int half, int first, int last) {
#pragma unroll
    for (int i = 0; i < S::kKeys / 8; ++i)
#pragma unroll
      for (int column = 0; column < 2; ++column)
        if (8 * i + column < first || 8 * i + column > last) scores[4 * i + 2 * half + column] = -INFINITY;
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < S::kKeys / 4; ++i) weights[i] = lamina::pack(scores[2 * i], scores[2 * i + 1], Math{});
  }

  // Rounded by itself: contracted into the addition behind, or not, it would have other bits.
  __device__ __forceinline__ void rescale_sums(const float2& keep) {
    sum[0] = __fmul_rn(sum[0], keep.x), sum[1] = __fmul_rn(sum[1], keep.y);
  }

  __device__ __forceinline__ void rescale_out(const float2& keep) {
    if (!__any_sync(kAllLanes, keep.x != 1.0f || keep.y != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < S::kDim / 2; ++i) out[i] *= i % 4 < 2 ? keep.x : keep.y;
  }

  // Reduces each row's sum over its four lanes.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
      sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
    }
  }

  // The same at the end of a fixed split, whose maxima become those of base 2.
  __device__ __forceinline__ void end_split() {
    end();
#pragma unroll
    for (int half = 0; half < 2; ++half) max[half] = __fmul_rn(max[half], scale_of(half));
  }

  // Keeps the rows in `memory`, of which each thread has kSetAside / 4 units of 16 bytes, kRowThreads apart.
  __device__ __forceinline__ void set_aside(float4* memory) const {
#pragma unroll
    for (int i = 0; i < S::kDim / 8; ++i)
      memory[i * S::kRowThreads] = float4{out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]};
    memory[S::kDim / 8 * S::kRowThreads] = float4{max[0], sum[0], max[1], sum[1]};
  }

  // Merges this split into those behind it, which were set aside.
  __device__ __forceinline__ void merge_into(const float4* memory) {
    const float4 kept = memory[S::kDim / 8 * S::kRowThreads];
    const MergeWeights weights[2] = {{kept.x, max[0]}, {kept.z, max[1]}};
    max[0] = weights[0].max, sum[0] = weights[0].merged(kept.y, sum[0]);
    max[1] = weights[1].max, sum[1] = weights[1].merged(kept.w, sum[1]);
#pragma unroll
    for (int i = 0; i < S::kDim / 8; ++i) {
      const float4 four = memory[i * S::kRowThreads];
      out[4 * i] = weights[0].merged(four.x, out[4 * i]), out[4 * i + 1] = weights[0].merged(four.y, out[4 * i + 1]);
      out[4 * i + 2] = weights[1].merged(four.z, out[4 * i + 2]);
      out[4 * i + 3] = weights[1].merged(four.w, out[4 * i + 3]);
    }
  }

  __device__ __forceinline__ void write(const typename S::Call& a, const WorkTile& work) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half), index = work.start + work.first - work.past + token[half];
      const float factor = a.value_scale / sum[half];
      T* to = a.out + index * a.out_token + (work.kv_head * a.group + r - token[half] * a.group) * a.out_head +
              lane_id() % 4 * 8;
#pragma unroll
      for (int i = 0; i < S::kDim / 2; i += 16) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = out + i + 4 * j + 2 * half;
          words[j] = lamina::pack(pair[0] * factor, pair[1] * factor, T{});
        }
        transpose_quad(words);
        if (r < work.rows) *reinterpret_cast<uint4*>(to + 2 * i) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }

  // To a slot of [partial_rows][kDim] sums, then each row's maximum and sum, of base 2.
  __device__ __forceinline__ void store_partial(float* slot, int partial_rows, int rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half);
      if (r >= rows) continue;
      float* to = slot + r * S::kDim + lane_id() % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::kDim / 8; ++i)
        *reinterpret_cast<float2*>(to + 8 * i) = float2{out[4 * i + 2 * half], out[4 * i + 2 * half + 1]};
      if (lane_id() % 4 == 0)
        reinterpret_cast<float2*>(slot + partial_rows * S::kDim)[r] = float2{max[half], sum[half]};
    }
  }

  __device__ __forceinline__ void store_partial(const Partial<S>& partial) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half);
      float* to = partial.sums + r * S::kDim + lane_id() % 4 * 2;
#pragma unroll
      for (int i = 0; i < S::kDim / 8; ++i)
        *reinterpret_cast<float2*>(to + 8 * i) = float2{out[4 * i + 2 * half], out[4 * i + 2 * half + 1]};
      if (lane_id() % 4 == 0) partial.stats(r) = float2{max[half] * scale_of(half), sum[half]};
    }
  }

 private:
  __device__ __forceinline__ float scale_of(int half) const { return scale[half % kScales]; }
  __device__ __forceinline__ int row(int half) const { return row_ + lane_id() / 4 + 8 * half; }

  const int row_;  // the warp's first
};

}  // namespace lamina
