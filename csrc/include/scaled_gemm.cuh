// What operands in one byte add to the GEMM kernels: scales, and of FP8 (e4m3) sums that leave the tensor cores early.
//
// The tensor cores add products of FP8 with fewer bits than float has. So each tile's columns, 128, are summed up there
// from zero, and those sums added up in float; scales of groups of 128 columns are multiplied at that moment. Sums of
// whole numbers stay there: they are exact.
#pragma once

#include <type_traits>

#include "byte_formats.cuh"
#include "hopper.cuh"
#include "split_k_shape.cuh"
#include "warpgroup.cuh"

namespace lamina {

constexpr int kGroup = kTileColumns<Float8>;  // columns that share a scale, where a row has several

struct ByteScales {
  const float* x_scale;                    // [tokens], or [tokens, groups] with these strides
  const float* weight_scale;               // [n] or [n, groups]
  int token_stride, group_stride, groups;  // groups 0: a scale a row
};
template <>
struct Scales<Float8> : ByteScales {};
template <>
struct Scales<Int8> : ByteScales {};

// The scales of a lane's sums, in the accumulator layout of WGMMA: of each 8 rows of x two neighbours, for weight rows
// lane / 4 and lane / 4 + 8 of its warp's sixteen.
class LaneScales {
 public:
  // Of the 64 weight rows from `row` on; what is read here no kernel of a step writes.
  template <typename In, typename Out>
  __device__ __forceinline__ LaneScales(const Linear<In, Out>& p, int row)
      : p_(p),
        x_scale_(p.x_scale),
        token_stride_(p.token_stride),
        group_stride_(p.group_stride),
        last_(p.tokens - 1),
        low_(row + threadIdx.x % 128 / kWarp * 16 + threadIdx.x % kWarp / 4) {
    high_ = min(low_ + 8, p.n - 1), low_ = min(low_, p.n - 1);  // rows behind the end are not stored
    if (p.groups != 0) return;
    of_low_ = p.weight_scale[low_], of_high_ = p.weight_scale[high_];
  }

  // The scales of x lie in shared memory: of `rows` rows from `token` on, of groups from `group` on.
  __device__ __forceinline__ void take_shared(const float* x_scale, int token, int rows, int group) {
    x_scale_ = x_scale, first_token_ = token, token_stride_ = 1;
    if (p_.groups != 0) first_group_ = group, group_stride_ = rows;
  }

  // The lane's first row of x.
  __device__ __forceinline__ static int lane_token(int token) { return token + threadIdx.x % 4 * 2; }

  // Adds up what the tensor cores have summed of a tile, 2 * kCount rows of x from `token` on.
  template <typename Part, int kCount>
  __device__ __forceinline__ void add(float* sums, const Part (&part)[kCount], int token, int group) const {
    if (p_.groups == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += static_cast<float>(part[i]);
      return;
    }
    const int at = min(group, p_.groups - 1);  // of columns behind the end all products are 0
    const float low = p_.weight_scale[static_cast<int64_t>(low_) * p_.groups + at];
    const float high = p_.weight_scale[static_cast<int64_t>(high_) * p_.groups + at];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float left = of_token(lane_token(token) + 2 * i, at), right = of_token(lane_token(token) + 2 * i + 1, at);
      sums[i] += part[i] * left * low, sums[i + 1] += part[i + 1] * right * low;
      sums[i + 2] += part[i + 2] * left * high, sums[i + 3] += part[i + 3] * right * high;
    }
  }

  // Multiplies by the scales of whole rows, where those are not of groups.
  template <int kCount>
  __device__ __forceinline__ void finish(float (&sums)[kCount], int token) const {
    if (p_.groups != 0) return;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float left = of_token(lane_token(token) + 2 * i, 0), right = of_token(lane_token(token) + 2 * i + 1, 0);
      sums[i] *= left * of_low_, sums[i + 1] *= right * of_low_;
      sums[i + 2] *= left * of_high_, sums[i + 3] *= right * of_high_;
    }
  }

 private:
  __device__ __forceinline__ float of_token(int token, int group) const {
    return x_scale_[(min(token, last_) - first_token_) * token_stride_ + (group - first_group_) * group_stride_];
  }

  const ByteScales& p_;
  const float* x_scale_;
  int token_stride_, group_stride_, first_token_ = 0, first_group_ = 0;
  const int last_;
  int low_, high_;
  float of_low_ = 1.0f, of_high_ = 1.0f;
};

// What the tensor cores sum up in.
template <typename In>
using Partial = std::conditional_t<std::is_same_v<In, Int8>, int, float>;

// The sums of a tile's columns from zero, begun: 64 rows of weights by `columns` rows of x.
template <int columns, typename In>
__device__ __forceinline__ void begin_tile(Partial<In> (&part)[columns / 2], uint32_t weights, uint32_t x, In format) {
  const uint64_t left = tile_descriptor(weights), right = tile_descriptor(x);
  wgmma_bytes<columns, 0>(part, left, right, format);
#pragma unroll
  for (int k = 1; k < kRowBytes / 32; ++k) wgmma_bytes<columns, 1>(part, left + 2 * k, right + 2 * k, format);
  wgmma_commit();
}

// Which of two neighbouring tiles, as a constant.
using Even = std::integral_constant<int, 0>;
using Odd = std::integral_constant<int, 1>;

// Takes `total` tiles in order, two of them under way at a time, so that the tensor cores go on while the sums of one
// are added up: begin(part, index, parity) starts one, finish(part, index, parity) has its sums.
template <typename Part, int kCount, typename Begin, typename Finish>
__device__ __forceinline__ void take_in_turns(int total, const Begin& begin, const Finish& finish) {
  Part even[kCount], odd[kCount];
  const auto finish_even = [&](int index) { pin(even), finish(even, index, Even{}); };
  const auto finish_odd = [&](int index) { pin(odd), finish(odd, index, Odd{}); };
  if (total == 0) return;
  begin(even, 0, Even{});
  int index = 1;
  for (; index + 1 < total; index += 2) {
    begin(odd, index, Odd{});
    wgmma_wait<1>();
    finish_even(index - 1);
    begin(even, index + 1, Even{});
    wgmma_wait<1>();
    finish_odd(index);
  }
  if (index == total) {
    wgmma_wait<0>();
    finish_even(index - 1);
    return;
  }
  begin(odd, index, Odd{});
  wgmma_wait<1>();
  finish_even(index - 1);
  wgmma_wait<0>();
  finish_odd(index);
}

// The same in pairs, of which none is under way while the next one is waited for.
template <typename Part, int kCount, typename Begin, typename Finish>
__device__ __forceinline__ void take_in_pairs(int total, const Begin& begin, const Finish& finish) {
  for (int index = 0; index < total; index += 2) {
    Part even[kCount], odd[kCount];
    begin(even, index, Even{});
    begin(odd, index + 1, Odd{});
    wgmma_wait<1>();
    pin(even), finish(even, index, Even{});
    wgmma_wait<0>();
    pin(odd), finish(odd, index + 1, Odd{});
  }
}

// The same, each by itself, in steps of one or two.
template <typename Part, int kCount, int kOfStep, typename Begin, typename Finish>
__device__ __forceinline__ void take_one_by_one(int total, const Begin& begin, const Finish& finish) {
  const auto take = [&](int index, auto parity) {
    Part part[kCount];
    begin(part, index, parity);
    wgmma_wait<0>();
    pin(part), finish(part, index, parity);
  };
  for (int index = 0; index < total; index += kOfStep) {
    take(index, Even{});
    if constexpr (kOfStep == 2) take(index + 1, Odd{});
  }
}

// Sums of whole numbers over all columns, times the scales.
template <int kCount>
__device__ __forceinline__ void scale_totals(float (&sums)[kCount], const int (&totals)[kCount],
                                             const LaneScales& scales, int token) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = static_cast<float>(totals[i]);
  scales.finish(sums, token);
}

}  // namespace lamina
