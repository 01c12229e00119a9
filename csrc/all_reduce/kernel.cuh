// out = the sum of every rank's x in the order of ranks, as float, rounded once.
//
// One-shot: every rank has every other's x, sent in packets where it is small and else read, and sums all of it.
// Two-shot: each sums a share of it and reads the shares of the others: less to read of three ranks or more, and one
// meeting more.
#pragma once

#include "peer_packets.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, and 8 words of RankPointers.
struct AllReduceArguments {
  RankPointers memory;
  int64_t num_ranks, first_rank, num_local, max_bytes, max_blocks, packet_bytes;
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

// put(i, get(i)) for those of a share's vectors, of which there are `count`, that are this thread's: kBatch of them
// under way at once.
template <int kBatch, typename T, typename Get, typename Put>
__device__ __forceinline__ void for_own_vecs(const AllReduce<T>& sum, int64_t count, const Get& get, const Put& put) {
  const int64_t begin = blockIdx.x * sum.each, end = begin + sum.each < count ? begin + sum.each : count;
  for (int64_t first = begin + threadIdx.x; first < end; first += kBatch * kRankThreads) {
    decltype(get(first)) values[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (first + k * kRankThreads < end) values[k] = get(first + k * kRankThreads);
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (first + k * kRankThreads < end) put(first + k * kRankThreads, values[k]);
  }
}

// A thread has one vector.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kPacketThreads) all_reduce_by_packets(const __grid_constant__ AllReduce<T> sum) {
  constexpr int kWidth = kVecWidth<T>;
  const OwnVecs own{static_cast<int>(blockIdx.x * kPacketThreads + threadIdx.x), 0, static_cast<int>(sum.vecs)};
  const T* x = static_cast<const T*>(sum.x.of[blockIdx.y]);
  T* out = static_cast<T*>(sum.out.of[blockIdx.y]);
  follow_predecessor();
  PeerBlock peers(sum.ranks);
  Vec<T, kWidth> vecs[1];
  if (own.has(0)) vecs[0] = load<kWidth>(x + own.at(0) * kWidth);
  send<kRanks>(peers, own, vecs);
  peers.leave();
  add_others<kRanks>(peers, own, vecs);
  if (own.has(0)) store(out + own.at(0) * kWidth, vecs[0]);
}

template <typename T>
__global__ void __launch_bounds__(kRankThreads, 1) all_reduce_one_shot(const __grid_constant__ AllReduce<T> sum) {
  constexpr int kWidth = kVecWidth<T>;
  const T* x = static_cast<const T*>(sum.x.of[blockIdx.y]);
  T* out = static_cast<T*>(sum.out.of[blockIdx.y]);
  follow_predecessor();
  PeerBlock peers(sum.ranks);
  T* own = peers.template input<T>(peers.rank());
  for_own_vecs<4>(
      sum, sum.share, [&](int64_t i) { return load<kWidth>(x + i * kWidth); },
      [&](int64_t i, const auto& vec) { store(own + i * kWidth, vec); });
  peers.template meet<0>();
  for_own_vecs<2>(
      sum, sum.share, [&](int64_t i) { return peers.template inputs<T>(i * kWidth); },
      [&](int64_t i, const auto& parts) { store(out + i * kWidth, sum_of(parts, peers.num_ranks())); });
}

template <typename T>
__global__ void __launch_bounds__(kRankThreads, 1) all_reduce_two_shot(const __grid_constant__ AllReduce<T> sum) {
  constexpr int kWidth = kVecWidth<T>;
  const T* x = static_cast<const T*>(sum.x.of[blockIdx.y]);
  T* out = static_cast<T*>(sum.out.of[blockIdx.y]);
  follow_predecessor();
  PeerBlock peers(sum.ranks);
  // f(rank, where vector i of its share lies in x) for every share that has one
  const auto for_shares = [&](int64_t i, const auto& f) {
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      const int64_t vec = rank * sum.share + i;
      if (rank < peers.num_ranks() && vec < sum.vecs) f(rank, vec * kWidth);
    }
  };
  const auto move = [&](T* to, const auto& get) {
    for_own_vecs<1>(
        sum, sum.share,
        [&](int64_t i) {
          Parts<T, kWidth> parts;
          for_shares(i, [&](int rank, int64_t at) { parts.of[rank] = load<kWidth>(get(rank, i, at)); });
          return parts;
        },
        [&](int64_t i, const auto& parts) {
          for_shares(i, [&](int rank, int64_t at) { store(to + at, parts.of[rank]); });
        });
  };
  move(peers.template input<T>(peers.rank()), [&](int, int64_t, int64_t at) { return x + at; });
  peers.template meet<0>();
  T* result = peers.template result<T>(peers.rank());
  const int64_t first = peers.rank() * sum.share, left = sum.vecs - first;  // for the last ranks there may be less
  for_own_vecs<2>(
      sum, left < sum.share ? left : sum.share,
      [&](int64_t i) { return peers.template inputs<T>((first + i) * kWidth); },
      [&](int64_t i, const auto& parts) { store(result + i * kWidth, sum_of(parts, peers.num_ranks())); });
  peers.template meet<1>();
  move(out, [&](int rank, int64_t i, int64_t) { return peers.template result<T>(rank) + i * kWidth; });
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
    const auto launch = [&](auto kernel, int64_t blocks, int64_t threads) {
      const AllReduce<T> sum{unpacked_ranks(p.memory, p.num_ranks, p.first_rank, p.max_bytes),
                             p.x,
                             p.out,
                             vecs,
                             share,
                             ceil_div(share, blocks)};
      return static_cast<int>(launch_ranks(kernel, blocks, p.num_local, threads, p.stream, sum));
    };
    const int64_t sending = ceil_div(vecs, kPacketThreads);
    if (!p.is_two_shot && goes_in_packets(vecs * kVecBytes, p.packet_bytes, sending, p.max_blocks))
      return with_most_ranks(p.num_ranks, [&](auto most) {
        return launch(all_reduce_by_packets<T, most.value>, sending, kPacketThreads);
      });
    const int64_t blocks = smaller(ceil_div(share, kRankThreads), p.max_blocks);
    return launch(p.is_two_shot ? all_reduce_two_shot<T> : all_reduce_one_shot<T>, blocks, kRankThreads);
  });
}

}  // namespace lamina
