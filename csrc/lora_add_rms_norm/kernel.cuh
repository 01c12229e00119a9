// What adapters add to a projection, the residual sum of that, and its norm: a cluster has whole rows of the outputs.
//
// Its blocks send each other the sums of the squares of what they have, and add them up in the order of the blocks.
#pragma once

#include "lora_outputs.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, strides in elements.
struct LoraAddNormArguments {
  const void *residual, *weight;
  void* total;
  int64_t residual_token;
  double eps;
  LoraArguments lora;
};

template <typename T>
struct NormOfSum {
  const T *residual, *weight;
  T* total;  // contiguous, as out
  int64_t residual_token;
  float eps;
};

// Places in a block's shared memory, behind those of ClusterMemory: sums of squares of 4 tokens, of its warps and of
// the blocks, for both halves of a round; and the barriers that count what blocks sent.
struct NormMemory {
  static constexpr uint32_t kFour = 16, kHalf = kSegments * kFour, kBytes = 4 * kHalf + 16;
  uint32_t of_warps, received, sent;

  __host__ __device__ explicit NormMemory(uint32_t begin)
      : of_warps(begin), received(begin + 2 * kHalf), sent(begin + 4 * kHalf) {}
};

__device__ __forceinline__ float warp_total(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Eight groups of four floats that follow each other, added up in their order.
__device__ __forceinline__ float4 add_eight(uint32_t from) {
  float4 total = {};
#pragma unroll
  for (int i = 0; i < kSegments; ++i) {
    const float4 four = load_four(from + static_cast<uint32_t>(i) * NormMemory::kFour);
    total.x += four.x, total.y += four.y, total.z += four.z, total.w += four.w;
  }
  return total;
}

template <typename T, int kRows>
struct WriteNormed {
  static constexpr int kParts = 1;
  static constexpr bool kMeets = true;
  using Own = Outputs<T, kRows, 1>;

  const Lora<T>& p;
  const NormOfSum<T>& norm;
  NormMemory at;
  int block;
  T weights[kRows], residual[kRows][kHalfRound];
  uint32_t parities;  // of the barriers of both halves

  // Before the kernel ahead has ended, as nothing writes weights.
  __device__ __forceinline__ WriteNormed(const Lora<T>& p, const NormOfSum<T>& norm, uint32_t memory)
      : p(p), norm(norm), at(memory), block(static_cast<int>(blockIdx.x) % kSegments), parities(0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = (block * kRows + r) * kLoraThreads + static_cast<int>(threadIdx.x);
      weights[r] = row < p.num_rows ? norm.weight[row] : T{};
    }
  }

  __device__ __forceinline__ uint32_t barrier(int half) const { return at.sent + static_cast<uint32_t>(half * 8); }

  __device__ __forceinline__ void init() const {
    init_barrier(barrier(0), 1);
    init_barrier(barrier(1), 1);
  }

  __device__ __forceinline__ void expect(int count) const {
    arrive_expecting(barrier(0), NormMemory::kHalf);
    if (count > kHalfRound) arrive_expecting(barrier(1), NormMemory::kHalf);
  }

  __device__ __forceinline__ void load(const Own& outputs, const LoraTile& tile) {
    outputs.for_each(tile, [&](int r, int t, int row) {
      residual[r][t] = norm.residual[static_cast<int64_t>(outputs.tokens[t]) * norm.residual_token + row];
    });
  }

  // The sums, rounded, in place of the outputs; and each warp's sums of their squares to shared memory.
  __device__ __forceinline__ void add_residual(Own& outputs, const LoraTile& tile, int half) const {
    float squares[kHalfRound] = {};
    outputs.for_each(tile, [&](int r, int t, int) {
      T& value = outputs.values[0][r][t];
      value = static_cast<T>(static_cast<float>(value) + static_cast<float>(residual[r][t]));
      squares[t] = fmaf(static_cast<float>(value), static_cast<float>(value), squares[t]);
    });
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) squares[t] = warp_total(squares[t]);
    const uint32_t to = at.of_warps + static_cast<uint32_t>(half) * NormMemory::kHalf;
    if (lane_index() == 0)
      store_four(to + static_cast<uint32_t>(warp_index()) * NormMemory::kFour,
                 {squares[0], squares[1], squares[2], squares[3]});
  }

  // The sums of squares of 4 tokens over whole rows, once every block has sent its own.
  __device__ __forceinline__ float4 squares_of_rows(int half) {
    const uint32_t of_half = static_cast<uint32_t>(half) * NormMemory::kHalf;
    __syncthreads();
    if (lane_index() == 0)
      send_to_peer(at.received + of_half + static_cast<uint32_t>(block) * NormMemory::kFour,
                   add_eight(at.of_warps + of_half), barrier(half), static_cast<uint32_t>(warp_index()));
    wait_barrier(barrier(half), parities >> half & 1);
    parities ^= 1u << half;
    return add_eight(at.received + of_half);
  }

  __device__ __forceinline__ void write(Own& outputs, const LoraTile& tile, int half) {
    add_residual(outputs, tile, half);
    const float4 four = squares_of_rows(half);
    const float squares[kHalfRound] = {four.x, four.y, four.z, four.w};
    float factors[kHalfRound];
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) factors[t] = rsqrtf(squares[t] / static_cast<float>(p.num_rows) + norm.eps);
    outputs.for_each(tile, [&](int r, int t, int row) {
      const int64_t to = static_cast<int64_t>(outputs.tokens[t]) * p.num_rows + row;
      const T total = outputs.values[0][r][t];
      const T unit = static_cast<T>(static_cast<float>(total) * factors[t]);
      norm.total[to] = total;
      p.out[to] = static_cast<T>(static_cast<float>(unit) * static_cast<float>(weights[r]));
    });
  }
};

template <typename T, int kChunks, int kRows>
__global__ void __launch_bounds__(kLoraThreads, kRows > 2 ? 1 : 2)
    lora_add_rms_norm_kernel(const __grid_constant__ Lora<T> p, const __grid_constant__ NormOfSum<T> norm) {
  extern __shared__ uint8_t shared[];
  start_successor();
  const ClusterMemory at(shared_address(shared), rank_tiles<1>(p));
  WriteNormed<T, kRows> finish(p, norm, at.end());
  add_adapters<kChunks, kRows>(p, at, finish);
}

template <typename T>
NormOfSum<T> unpacked_norm(const LoraAddNormArguments& a) {
  return {static_cast<const T*>(a.residual), static_cast<const T*>(a.weight), static_cast<T*>(a.total),
          a.residual_token, static_cast<float>(a.eps)};
}

// Rows of B that a thread has where a cluster has whole rows of the outputs.
constexpr int kMostNormRows = 4;
inline int norm_rows(int64_t num_rows) {
  int rows = 1;
  while (rows * kSegments * kLoraThreads < num_rows) rows *= 2;
  return rows;
}

template <typename T>
void divide_by_rows(Lora<T>& p, int num_slots) {
  p.num_groups = groups_at_once(p, num_slots);
  p.set_block_rows(norm_rows(p.num_rows) * kLoraThreads);
}

}  // namespace lamina
