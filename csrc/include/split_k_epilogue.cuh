// Epilogue of the split-K GEMM: partial sums of a cluster's blocks are added in the order of their ranks, then bias,
// gate, rounding and store.
#pragma once

#include "cuda_mma.cuh"
#include "hopper.cuh"
#include "split_k_shape.cuh"
#include "vec.cuh"

namespace lamina {

template <typename T>
__device__ __forceinline__ void store_run(T* out, const float (&values)[kRun], int row, int width) {
  if (width % kRun == 0) {
    store(out + row, from_floats<T>(values));
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (row + i < width) out[row + i] = static_cast<T>(values[i]);
  }
}

// Rounded where the separate ops round, to their bits: gate and up, then silu(gate), then silu(gate) * up.
template <typename T>
__device__ __forceinline__ void gate_values(float (&gate)[kRun], float (&up)[kRun]) {
  round_to<T>(gate);
  round_to<T>(up);
#pragma unroll
  for (int i = 0; i < kRun; ++i) gate[i] = over_one_and_exp(gate[i], -gate[i]);
  round_to<T>(gate);
#pragma unroll
  for (int i = 0; i < kRun; ++i) gate[i] *= up[i];
}

// The results of `runs` times eight neighbouring rows of each token, beginning at first_row. fetch(values, column, run,
// is_up) gives the sums of a token and eight rows; threads take every `stride`th of them, beginning at `index`.
template <bool kGated, typename In, typename Out, typename Fetch>
__device__ __forceinline__ void finish_runs(const Linear<In, Out>& p, const SplitKTile& work, int tokens, int first_row,
                                            int runs, int index, int stride, const Fetch& fetch) {
  const int width = kGated ? p.n / 2 : p.n;
  const auto fetch_biased = [&](float (&values)[kRun], int column, int run, bool is_up) {
    fetch(values, column, run, is_up);
    if (p.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int row = first_row + run + i;
      if (row < width) values[i] += static_cast<float>(p.bias[is_up ? width + row : row]);
    }
  };
  for (int i = index; i < runs * min(p.tokens - work.token, tokens); i += stride) {
    const int column = i / runs, run = i % runs * kRun, row = first_row + run;
    if (row >= width) continue;
    float values[kRun];
    fetch_biased(values, column, run, false);
    if constexpr (kGated) {
      float up[kRun];
      fetch_biased(up, column, run, true);
      gate_values<Out>(values, up);
    }
    store_run(p.out + static_cast<int64_t>(work.token + column) * width, values, row, width);
  }
}

// Accumulators to shared memory, a token's next to each other.
template <typename S>
__device__ __forceinline__ void keep_sums(float* kept, const typename S::Sums& sums) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(sums) / sizeof(float)); i += 4) {
    float* to = kept + (i * 2 + column) * S::kPitch + row;
    to[0] = sums[i];
    to[S::kPitch] = sums[i + 1];
    to[8] = sums[i + 2];
    to[S::kPitch + 8] = sums[i + 3];
  }
}

// The results of a block without split-K, or of every split_k-th run of a cluster's, whose blocks have kept their sums.
template <typename S, bool kGated, typename In, typename Out>
__device__ __forceinline__ void finish_kept(const Linear<In, Out>& p, const float* kept, const SplitKTile& work) {
  constexpr int kWidth = kGated ? S::kBlockRows / 2 : S::kBlockRows;
  const auto fetch = [&](float (&values)[kRun], int column, int run, bool is_up) {
    const float* from = kept + column * S::kPitch + run + (is_up ? kWidth : 0);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = work.split_k == 1 ? from[i] : 0.0f;
    for (int rank = 0; work.split_k > 1 && rank < work.split_k; ++rank) {
#pragma unroll
      for (int i = 0; i < kRun; i += 4) {
        const float4 four = load_from_peer(shared_address(from + i), rank * work.multicast + work.multicast_rank);
        values[i] += four.x, values[i + 1] += four.y, values[i + 2] += four.z, values[i + 3] += four.w;
      }
    }
  };
  finish_runs<kGated>(p, work, S::kTokenRows, work.tile * kWidth, kWidth / kRun, work.rank * S::kThreads + threadIdx.x,
                      work.split_k * S::kThreads, fetch);
}

// Every rank adds up the sums of some rows: its share of the gate's and the same of up's.
template <typename S, bool kGated>
__device__ __forceinline__ void send_sums(const typename S::Sums& sums, uint32_t received, uint32_t sent,
                                          const SplitKTile& work) {
  constexpr int kWidth = kGated ? S::kBlockRows / 2 : S::kBlockRows;
  const int owned = kWidth / work.split_k, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8, in_tile = row % kWidth;
    const int offset = (work.rank * (S::kBlockRows / kWidth) + row / kWidth) * owned + in_tile % owned;
    const uint32_t peer = in_tile / owned * work.multicast + work.multicast_rank;
#pragma unroll
    for (int i = 0; i < S::kTokenRows / 2; i += 4) {
      const uint32_t to = received + (offset * S::kTokenRows + i * 2 + column) * 4;
      send_to_peer(to, sums[i + 2 * half], sums[i + 2 * half + 1], sent, peer);
    }
  }
}

// The results of the rows whose sums were sent to this block.
template <typename S, bool kGated, typename In, typename Out>
__device__ __forceinline__ void finish_sent(const Linear<In, Out>& p, const float* received, const SplitKTile& work) {
  constexpr int kWidth = kGated ? S::kBlockRows / 2 : S::kBlockRows;
  const int owned = kWidth / work.split_k, of_rank = S::kBlockRows / work.split_k * S::kTokenRows;
  const auto fetch = [&](float (&values)[kRun], int column, int run, bool is_up) {
    const float* from = received + (run + (is_up ? owned : 0)) * S::kTokenRows + column;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      values[i] = 0.0f;
      for (int rank = 0; rank < work.split_k; ++rank) values[i] += from[rank * of_rank + i * S::kTokenRows];
    }
  };
  finish_runs<kGated>(p, work, S::kTokenRows, work.tile * kWidth + work.rank * owned, owned / kRun, threadIdx.x,
                      S::kThreads, fetch);
}

}  // namespace lamina
