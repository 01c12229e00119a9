// Online softmax of one warp's rows, around its two GEMMs.
#pragma once

#include "tile_scheduler.cuh"

namespace lamina {

// One warp's rows: scores, running maximum and sum, output accumulators.
template <typename S>
class WarpSoftmax {
  using T = typename S::T;
  using Cached = typename S::Cached;
  static constexpr int kTiles = S::kTiles;
  using Scores = float[S::kTeamWarps][kTiles][4];

 public:
  __device__ __forceinline__ WarpSoftmax(const typename S::Call& a, const WorkTile& work)
      : a_(a), work_(work), warp_(static_cast<int>(threadIdx.x) / 32), row_(warp_ % S::kTeamWarps * S::kWarpRows) {
    const bool empty = row_ >= work.rows;
    first_position_ = position(row_);
    last_position_ = empty ? -1 : position(row_ + S::kWarpRows - 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      max_[n][0] = max_[n][1] = -INFINITY;
      sum_[n][0] = sum_[n][1] = 0.0f;
#pragma unroll
      for (int t = 0; t < S::kDim / 16; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[t][n][i] = 0.0f;
    }
  }

  // Reads the query rows; those past the last are its copies, never written.
  __device__ __forceinline__ void load_queries(T* memory) {
    mma_.load_queries(memory + warp_ * S::Mma::kQueryElements, a_.head_dim, [&](int r) {
      const int row = work_.first_row + min(row_ + r, work_.rows - 1);
      return a_.query + (work_.start + row / a_.group) * a_.query_token +
             (work_.kv_head * a_.group + row % a_.group) * a_.query_head;
    });
  }

  // Makes of the rows that were read what keys are multiplied by.
  __device__ __forceinline__ void prepare_queries() {
    if constexpr (S::kRotates) {
      const int first = work_.start * (S::kDim / 2);
      mma_.prepare_queries(Angles{a_.cos + first, a_.sin + first});
    } else {
      mma_.prepare_queries(NoAngles{});
    }
  }

  __device__ __forceinline__ void attend(const Cached* keys, const Cached* values, int first_key) {
    const int last_key = first_key + S::kTileKeys - 1;
    if (first_key > last_position_ || last_key < a_.oldest(first_position_)) return;
    Scores scores;
#pragma unroll
    for (int m = 0; m < S::kTeamWarps; ++m) mma_.score(scores[m], keys + m * 16 * S::kPitch);
    scale(scores);
    const bool all_visible =
        last_key < work_.end && last_key <= first_position_ && first_key >= a_.oldest(last_position_);
    if (!all_visible) mask(scores, first_key);
    exponentiate(scores);
#pragma unroll
    for (int m = 0; m < S::kTeamWarps; ++m) mma_.accumulate(out_, scores[m], values + m * 16 * S::kPitch);
  }

  // Stores [rows][kResultPitch] unnormalised outputs, and each row's maximum and sum.
  __device__ __forceinline__ void store_results(float* results, float2* stats) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp_ * S::kWarpRows + 8 * n + lane_id() % 4 * 2 + i;
        const float sum = over_lanes(sum_[n][i], [](float x, float y) { return x + y; });
        if (lane_id() < 4) stats[row] = float2{max_[n][i], sum};
#pragma unroll
        for (int t = 0; t < S::kDim / 16; ++t) {
          float* to = results + row * S::kResultPitch + 16 * t + lane_id() / 4 * S::Mma::kStep;
          to[0] = out_[t][n][i];
          to[S::Mma::kNext] = out_[t][n][i + 2];
        }
      }
  }

 private:
  __device__ __forceinline__ int position(int row) const {
    return work_.past + (work_.first_row + min(row, work_.rows - 1)) / a_.group;
  }

  // Combines the values of the eight lanes that hold the same query row.
  template <typename Combine>
  static __device__ __forceinline__ float over_lanes(float x, const Combine& combine) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
    return x;
  }

  template <typename Visit>
  static __device__ __forceinline__ void each(Scores& scores, const Visit& visit) {
#pragma unroll
    for (int m = 0; m < S::kTeamWarps; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(scores[m][n][i], m, n, i);
  }

  __device__ __forceinline__ void scale(Scores& scores) const {
    const float scale = a_.scale, cap = a_.cap;
    if (cap > 0.0f)
      each(scores, [=](float& x, int, int n, int i) { x = cap * tanhf(scale * mma_.unit(n, i % 2) * x); });
    else
      each(scores, [=](float& x, int, int n, int i) { x *= scale * mma_.unit(n, i % 2); });
  }

  __device__ __forceinline__ void mask(Scores& scores, int first_key) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int last = position(row_ + 8 * n + lane_id() % 4 * 2 + column);
        const int oldest = a_.oldest(last);
#pragma unroll
        for (int m = 0; m < S::kTeamWarps; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = first_key + 16 * m + 8 * half + lane_id() / 4;
            if (key < oldest || key > last || key >= work_.end) scores[m][n][2 * half + column] = -INFINITY;
          }
      }
  }

  // Scores to probabilities relative to the rows' new maxima; rescales what was accumulated before.
  __device__ __forceinline__ void exponentiate(Scores& scores) {
    float keep[kTiles][2];
    bool grown = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = max_[n][i];
#pragma unroll
        for (int m = 0; m < S::kTeamWarps; ++m) top = fmaxf(top, fmaxf(scores[m][n][i], scores[m][n][i + 2]));
        top = over_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        const float base = top == -INFINITY ? 0.0f : top;  // no key seen yet: probabilities of 0, not of NaN
        keep[n][i] = exp2_fast(max_[n][i] - base);
        grown |= top != max_[n][i];
        max_[n][i] = top;
        sum_[n][i] *= keep[n][i];
#pragma unroll
        for (int m = 0; m < S::kTeamWarps; ++m)
#pragma unroll
          for (int half = 0; half < 4; half += 2) {
            float& score = scores[m][n][i + half];
            score = exp2_fast(score - (base - S::Mma::kWeightShift));
            sum_[n][i] += score;
          }
      }
    if (!__any_sync(kAllLanes, grown)) return;  // every factor is 1
#pragma unroll
    for (int t = 0; t < S::kDim / 16; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[t][n][i] *= keep[n][i % 2];
  }

  const typename S::Call& a_;
  const WorkTile& work_;
  int warp_, row_, first_position_, last_position_;
  typename S::Mma mma_;
  float max_[kTiles][2], sum_[kTiles][2];
  float out_[S::kDim / 16][kTiles][4];
};

}  // namespace lamina
