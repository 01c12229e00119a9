// Epilogue of the persistent GEMM: from WGMMA accumulators to global memory, without a detour through shared memory.
#pragma once

#include "cuda_mma.cuh"
#include "hopper.cuh"
#include "persistent_shape.cuh"
#include "quad_transpose.cuh"
#include "scaled_gemm.cuh"
#include "split_k_epilogue.cuh"

namespace lamina {

// Signals to every producer that fills a stage that this warp has read it.
template <typename S>
__device__ __forceinline__ void release_stage(const PersistentLayout& at, int stage) {
  const int lane = threadIdx.x % kWarp,
            first = static_cast<int>(blockIdx.x) % S::kCluster / S::kMulticast * S::kMulticast;
  if constexpr (S::kMulticast == 1) {
    if (lane == 0) arrive(at.empty + stage * 8);
  } else {
    if (lane < S::kMulticast) arrive_at_peer(at.empty + stage * 8, first + lane);
  }
}

// Split-K reduction through distributed shared memory: sends every other rank the partial sums of its rows of x, to the
// stages that it has taken for them, and adds up those of this rank's rows in the order of the ranks; they come to lie
// first.
template <typename S>
class ClusterReduction {
 public:
  __device__ __forceinline__ ClusterReduction(const PersistentLayout& at, int block)
      : at_(at), rank_(block / S::kMulticast), multicast_rank_(block % S::kMulticast) {}

  __device__ __forceinline__ int rank() const { return rank_; }

  template <int kCount>
  __device__ __forceinline__ void run(float (&sums)[kCount], PipelineState<S::kStages>& state) {
    constexpr int kAdded = kCount / S::kSplitK;
    asm volatile("" : "+r"(rank_));  // what is made of it would else take registers from the accumulators
    wait_barrier(at_.ready, parity_);
    parity_ ^= 1;
#pragma unroll
    for (int peer = 0; peer < S::kSplitK; ++peer) {
      const int slot = (rank_ < peer ? rank_ : rank_ - 1) * (kAdded / 4);
#pragma unroll
      for (int i = 0; i < kAdded; i += 4) {
        const float* four = sums + peer * kAdded + i;
        if (peer == rank_) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i + j] = four[j];  // over some that were sent
        } else {
          const int unit = slot + i / 4;
          send_to_peer(at_.tiles + offset_of(state, unit), float4{four[0], four[1], four[2], four[3]},
                       at_.full + stage_of(state, unit) * 8, peer * S::kMulticast + multicast_rank_);
        }
      }
    }
    PipelineState<S::kStages> next = state;
#pragma unroll
    for (int i = 0; i < S::kSumStages; ++i, next.advance()) wait_barrier(at_.full + next.stage * 8, next.parity);
    add_up<kAdded>(sums, state);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < S::kSumStages; ++i, state.advance()) release_stage<S>(at_, state.stage);
    if (threadIdx.x % kWarp == 0) arrive(at_.summed);
  }

 private:
  __device__ __forceinline__ static int stage_of(const PipelineState<S::kStages>& state, int unit) {
    const int stage = state.stage + unit / S::kUnitsInStage;
    return stage < S::kStages ? stage : stage - S::kStages;
  }

  __device__ __forceinline__ static uint32_t offset_of(const PipelineState<S::kStages>& state, int unit) {
    return stage_of(state, unit) * S::kStageBytes + unit % S::kUnitsInStage * S::kUnitBytes + threadIdx.x * 16;
  }

  template <int kAdded, int kCount>
  __device__ __forceinline__ void add_up(float (&own)[kCount], const PipelineState<S::kStages>& state) const {
#pragma unroll
    for (int i = 0; i < kAdded; i += 4) {
      float total[4] = {};
#pragma unroll
      for (int peer = 0; peer < S::kSplitK; ++peer) {
        float4 four = {own[i], own[i + 1], own[i + 2], own[i + 3]};
        if (peer != rank_) {
          const int unit = (peer < rank_ ? peer : peer - 1) * (kAdded / 4) + i / 4;
          four = load_four(at_.tiles + offset_of(state, unit));
        }
        total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i + j] = total[j];
    }
  }

  const PersistentLayout& at_;
  int rank_;
  const int multicast_rank_;
  uint32_t parity_ = 0;
};

// Adds the bias, applies the gate, rounds and stores. `sums` is in the accumulator layout of WGMMA: a lane has of each
// 8 rows of x two neighbours, for weight rows lane / 4 and lane / 4 + 8 of its warp's sixteen; where kGated the latter
// two are gate and up.
template <typename In, typename Out, bool kGated>
class PersistentEpilogue {
 public:
  __device__ __forceinline__ PersistentEpilogue(const Linear<In, Out>& p, int strip)
      : p_(p),
        lane_(threadIdx.x % kWarp),
        width_(kGated ? p.n / 2 : p.n),
        first_(strip * (kGated ? kRows / 2 : kRows) + threadIdx.x % 128 / kWarp * (kGated ? 8 : 16)) {
    if (p.bias == nullptr) return;
    const int low = first_ + lane_ / 4, high = kGated ? low : low + 8;
    if (low < width_) bias_[0] = static_cast<float>(p.bias[low]);
    if (high < width_) bias_[1] = static_cast<float>(p.bias[kGated ? high + width_ : high]);
  }

  // Those of the operands.
  __device__ __forceinline__ LaneScales scales() const {
    return LaneScales(p_, first_ - threadIdx.x % 128 / kWarp * 16);
  }

  // Stores the rows of x from `token` on and before `end`.
  template <int kCount, int kSums>
  __device__ __forceinline__ void write(const float (&sums)[kSums], int token, int end) const {
    constexpr int kBlocks = kCount / 4, kTaken = kGated ? 4 : 2;  // of 8 rows of x; and at once
#pragma unroll
    for (int block = 0; block < kBlocks; block += kTaken) {
      uint32_t words[4];
      if constexpr (kGated) {
        gate_words<kCount>(words, sums, block);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (block + i / 2) * 4 + i % 2 * 2;
          const bool is_there = block + i / 2 < kBlocks;
          words[i] = is_there ? pack(sums[at] + bias_[i % 2], sums[at + 1] + bias_[i % 2], Out{}) : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = transpose_matrix(words[i]);
      transpose_quad(words);
      const int word = lane_ % 4, in_block = block + (kGated ? word : word / 2);
      const int row = first_ + (kGated ? 0 : word % 2 * 8), of_x = token + in_block * 8 + lane_ / 4;
      if (in_block < kBlocks && of_x < min(end, p_.tokens) && row < width_)
        store_raw(p_.out + static_cast<int64_t>(of_x) * width_ + row, uint4{words[0], words[1], words[2], words[3]});
    }
  }

 private:
  template <int kCount, int kSums>
  __device__ __forceinline__ void gate_words(uint32_t (&words)[4], const float (&sums)[kSums], int block) const {
    float gate[kRun], up[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int at = (block + i / 2) * 4 + i % 2;
      const bool is_there = at < kCount;
      gate[i] = is_there ? sums[at] + bias_[0] : 0.0f;
      up[i] = is_there ? sums[at + 2] + bias_[1] : 0.0f;
    }
    gate_values<Out>(gate, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack(gate[2 * i], gate[2 * i + 1], Out{});
  }

  const Linear<In, Out>& p_;
  const int lane_, width_, first_;
  float bias_[2] = {};
};

}  // namespace lamina
