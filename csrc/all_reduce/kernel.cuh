// out = the sum of every rank's x in the order of ranks, as float, rounded once.
//
// One-shot: every rank reads every other's x and sums all of it. Two-shot: each sums a share of it and reads the shares
// of the others: less to read of three ranks or more, and one meeting more.
#pragma once

#include "peers.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, and 8 words of RankPointers.
struct AllReduceArguments {
  RankPointers memory;
  int64_t num_ranks, first_rank, num_local, max_bytes, max_blocks;
  RankPointers x, out;  // of each rank of this launch
  int64_t count, is_two_shot, dtype;
  cudaStream_t stream;
};

template <typename T>
struct AllReduce {
  PeerRanks ranks;
  RankPointers x, out;
  int64_t vecs;   // of x
  int64_t share;  // of vecs, that a rank sums: all, or a num_ranks'th, rounded up
  int64_t each;   // of a share, that a block sums
};

// Calls take(i) for every vector of a share that is this thread's.
template <typename T, typename Take>
__device__ __forceinline__ void for_own_vecs(const AllReduce<T>& sum, const Take& take) {
  const int64_t begin = blockIdx.x * sum.each, end = begin + sum.each < sum.share ? begin + sum.each : sum.share;
  for (int64_t i = begin + threadIdx.x; i < end; i += kRankThreads) take(i);
}

template <typename T>
__global__ void __launch_bounds__(kRankThreads, 1) all_reduce_one_shot(const __grid_constant__ AllReduce<T> sum) {
  constexpr int kWidth = kVecWidth<T>;
  const T* x = static_cast<const T*>(sum.x.of[blockIdx.y]);
  T* out = static_cast<T*>(sum.out.of[blockIdx.y]);
  follow_predecessor();
  PeerBlock peers(sum.ranks);
  T* own = peers.template input<T>(peers.rank());
  for_own_vecs(sum, [&](int64_t i) { store(own + i * kWidth, load<kWidth>(x + i * kWidth)); });
  peers.template meet<0>();
  for_own_vecs(sum, [&](int64_t i) {
    store(out + i * kWidth, sum_of_ranks<T, kWidth>(peers.num_ranks(), [&](int rank) {
            return load<kWidth>(peers.template input<T>(rank) + i * kWidth);
          }));
  });
}

template <typename T>
__global__ void __launch_bounds__(kRankThreads, 1) all_reduce_two_shot(const __grid_constant__ AllReduce<T> sum) {
  constexpr int kWidth = kVecWidth<T>;
  const T* x = static_cast<const T*>(sum.x.of[blockIdx.y]);
  T* out = static_cast<T*>(sum.out.of[blockIdx.y]);
  follow_predecessor();
  PeerBlock peers(sum.ranks);
  // the share of each rank in turn: f(rank, where its vector i lies in x)
  const auto of_shares = [&](int64_t i, const auto& f) {
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      const int64_t vec = rank * sum.share + i;
      if (rank < peers.num_ranks() && vec < sum.vecs) f(rank, vec * kWidth);
    }
  };
  T* own = peers.template input<T>(peers.rank());
  for_own_vecs(sum, [&](int64_t i) { of_shares(i, [&](int, int64_t at) { store(own + at, load<kWidth>(x + at)); }); });
  peers.template meet<0>();
  T* result = peers.template result<T>(peers.rank());
  for_own_vecs(sum, [&](int64_t i) {
    const int64_t vec = peers.rank() * sum.share + i;
    if (vec >= sum.vecs) return;
    store(result + i * kWidth, sum_of_ranks<T, kWidth>(peers.num_ranks(), [&](int rank) {
            return load<kWidth>(peers.template input<T>(rank) + vec * kWidth);
          }));
  });
  peers.template meet<1>();
  for_own_vecs(sum, [&](int64_t i) {
    Vec<T, kWidth> parts[kMaxRanks];
    of_shares(i, [&](int rank, int64_t) { parts[rank] = load<kWidth>(peers.template result<T>(rank) + i * kWidth); });
    of_shares(i, [&](int rank, int64_t at) { store(out + at, parts[rank]); });
  });
}

inline int all_reduce(const AllReduceArguments& p) {
  if (!is_group(p.num_ranks, p.num_local, p.max_blocks)) return cudaErrorInvalidValue;
  return with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    bool is_even = whole_vecs<T>(p.count);
    for (int64_t i = 0; i < p.num_local; ++i) is_even = is_even && aligned(p.x.of[i], p.out.of[i]);
    if (!is_even || p.count * static_cast<int64_t>(sizeof(T)) > p.max_bytes)
      return static_cast<int>(cudaErrorInvalidValue);
    if (p.count == 0) return static_cast<int>(cudaSuccess);
    const int64_t vecs = p.count / kVecWidth<T>, share = p.is_two_shot ? ceil_div(vecs, p.num_ranks) : vecs;
    const int64_t blocks = smaller(ceil_div(share, kRankThreads), p.max_blocks);
    const AllReduce<T> sum{unpacked_ranks(p.memory, p.num_ranks, p.first_rank, p.max_bytes),
                           p.x,
                           p.out,
                           vecs,
                           share,
                           ceil_div(share, blocks)};
    const auto kernel = p.is_two_shot ? all_reduce_two_shot<T> : all_reduce_one_shot<T>;
    return static_cast<int>(launch_ranks(kernel, blocks, p.num_local, kRankThreads, p.stream, sum));
  });
}

}  // namespace lamina
