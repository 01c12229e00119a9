// x = the sum over ranks as all_reduce has it, one-shot, then add_rms_norm, with the bits of both.
#pragma once

#include "peer_packets.cuh"
#include "row_norm.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, and 8 words of RankPointers.
struct AllReduceAddNormArguments {
  RankPointers memory;
  int64_t num_ranks, first_rank, num_local, max_bytes, max_blocks, packet_bytes;
  RankPointers x, residual, out, total;  // of each rank of this launch
  const void* weight;
  int64_t rows, hidden;
  double eps;
  int64_t unrounded, dtype;
  cudaStream_t stream;
};

template <typename T>
struct AllReduceAddNorm {
  PeerRanks ranks;
  RankPointers x, residual, out, total;
  const T* weight;
  int64_t rows, hidden;
  float eps;
};

// What of it belongs to the rank of this block.
template <typename T>
__device__ __forceinline__ RowNorm<T> norm_of_rank(const AllReduceAddNorm<T>& p) {
  return {static_cast<const T*>(p.x.of[blockIdx.y]),
          static_cast<const T*>(p.residual.of[blockIdx.y]),
          p.weight,
          static_cast<T*>(p.out.of[blockIdx.y]),
          static_cast<T*>(p.total.of[blockIdx.y]),
          p.rows,
          p.hidden,
          p.hidden,
          p.hidden,
          p.eps};
}

// A thread's vectors of a row that a block holds, as norm_held_row has them: f(which of kVecs, at which element).
template <typename T, int kVecs, typename Function>
__device__ __forceinline__ void for_vecs(int64_t hidden, const Function& f) {
  constexpr int kWidth = kVecWidth<T>;
  const int64_t vecs = hidden / kWidth;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < vecs) f(i, vec * kWidth);
  }
}

constexpr int kMostHeld = 8;  // vectors of all ranks that a thread of a whole block has registers for

// A block has one row, and a thread sends all that it has of it before it waits for anybody.
template <typename T, int kVecs, int kRanks, Sum kSum>
__global__ void __launch_bounds__(kMaxThreads, 1)
    all_reduce_and_norm_by_packets(const __grid_constant__ AllReduceAddNorm<T> p) {
  constexpr int kWidth = kVecWidth<T>;
  const RowNorm<T> norm = norm_of_rank(p);
  const int row = static_cast<int>(blockIdx.x), vecs = static_cast<int>(p.hidden / kWidth);
  const OwnVecs of_row{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), vecs};
  const OwnVecs own{row * vecs + of_row.first, of_row.step, row * vecs + vecs};
  const auto load_all = [](Vec<T, kWidth>(&to)[kVecs], const T* from, const OwnVecs& which) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (which.has(i)) to[i] = load<kWidth>(from + which.at(i) * kWidth);
  };
  Vec<T, kWidth> values[kVecs], residual[kVecs], weight[kVecs];
  start_successor();
  load_all(weight, p.weight, of_row);  // no step writes weights
  wait_for_predecessor();
  PeerBlock peers(p.ranks);  // the epoch, x and the residual are under way at once
  load_all(values, norm.x, own);
  load_all(residual, norm.residual, own);
  send<kRanks>(peers, own, values);
  peers.leave();
  add_others<kRanks>(peers, own, values);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {  // unpacked here and no earlier, as that would wait for them
    keep_packed(residual[i]);
    keep_packed(weight[i]);
  }
  norm_held_row<kVecs, kSum, Weight::kPlain>(
      norm, row, values, residual, weight, true,
      [&](int, int vec, const Vec<T, kWidth>& result) { store(norm.out + (row * vecs + vec) * kWidth, result); });
}

// A block has every gridDim.x'th row, kVecs vectors of each a thread, as add_rms_norm's has.
template <typename T, int kVecs, Sum kSum>
__global__ void __launch_bounds__(kMaxThreads, 1) all_reduce_and_norm(const __grid_constant__ AllReduceAddNorm<T> p) {
  constexpr int kWidth = kVecWidth<T>;
  const RowNorm<T> norm = norm_of_rank(p);
  Vec<T, kWidth> values[kVecs], residual[kVecs], weight[kVecs];
  start_successor();
  for_vecs<T, kVecs>(p.hidden, [&](int i, int at) { weight[i] = load<kWidth>(p.weight + at); });  // no step writes them
  wait_for_predecessor();
  PeerBlock peers(p.ranks);
  T* input = peers.template input<T>(peers.rank());
  for (int64_t start = blockIdx.x * p.hidden; start < p.rows * p.hidden; start += gridDim.x * p.hidden)
    for_vecs<T, kVecs>(p.hidden, [&](int, int at) { store(input + start + at, load<kWidth>(norm.x + start + at)); });
  peers.template meet<0>();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t start = row * p.hidden;
    for_vecs<T, kVecs>(p.hidden, [&](int i, int at) {
      residual[i] = load<kWidth>(norm.residual + start + at);
      values[i] = sum_of(peers.template inputs<T>(start + at), peers.num_ranks());
    });
    norm_held_row<kVecs, kSum, Weight::kPlain>(
        norm, row, values, residual, weight, true,
        [&](int, int vec, const Vec<T, kWidth>& result) { store(norm.out + start + vec * kWidth, result); });
    __syncthreads();  // before the next row's sum of squares is written over this one's
  }
}

inline int all_reduce_add_rms_norm(const AllReduceAddNormArguments& p) {
  if (!is_group(p.num_ranks, p.num_local, p.max_blocks)) return cudaErrorInvalidValue;
  return with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vecs = p.hidden / kVecWidth<T>, bytes = p.rows * p.hidden * static_cast<int64_t>(sizeof(T));
    bool is_even = whole_vecs<T>(p.hidden) && aligned(p.weight);
    for (int64_t i = 0; i < p.num_local; ++i)
      is_even = is_even && aligned(p.x.of[i], p.residual.of[i], p.out.of[i], p.total.of[i]);
    if (!is_even || !block_holds(vecs) || bytes > p.max_bytes) return static_cast<int>(cudaErrorInvalidValue);
    if (bytes == 0) return static_cast<int>(cudaSuccess);
    const AllReduceAddNorm<T> call{unpacked_ranks(p.memory, p.num_ranks, p.first_rank, p.max_bytes),
                                   p.x,
                                   p.residual,
                                   p.out,
                                   p.total,
                                   static_cast<const T*>(p.weight),
                                   p.rows,
                                   p.hidden,
                                   static_cast<float>(p.eps)};
    return with_held_row(vecs, [&](auto each, int64_t threads) {
      const auto launch = [&](auto kernel, int64_t blocks) {
        return static_cast<int>(launch_ranks(kernel, blocks, p.num_local, threads, p.stream, call));
      };
      const auto launch_meeting = [&] {
        return launch(p.unrounded ? all_reduce_and_norm<T, each.value, Sum::kUnrounded>
                                  : all_reduce_and_norm<T, each.value, Sum::kRounded>,
                      smaller(p.rows, p.max_blocks));
      };
      if (!goes_in_packets(bytes, p.packet_bytes, p.rows, p.max_blocks)) return launch_meeting();
      return with_most_ranks(p.num_ranks, [&](auto most) {
        constexpr int kVecs = each.value, kRanks = most.value;
        if constexpr (kVecs * kRanks > kMostHeld)
          return launch_meeting();
        else
          return launch(p.unrounded ? all_reduce_and_norm_by_packets<T, kVecs, kRanks, Sum::kUnrounded>
                                    : all_reduce_and_norm_by_packets<T, kVecs, kRanks, Sum::kRounded>,
                        p.rows);
      });
    });
  });
}

}  // namespace lamina
