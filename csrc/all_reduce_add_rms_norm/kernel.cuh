// One-shot: x = the sum over ranks as all_reduce has it, then add_rms_norm, with the bits of both.
#pragma once

#include "peers.cuh"
#include "row_norm.cuh"

namespace lamina {

// As the caller packs them: 8 bytes each, and 8 words of RankPointers.
struct AllReduceAddNormArguments {
  RankPointers memory;
  int64_t num_ranks, first_rank, num_local, max_bytes, max_blocks;
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

// A block has every gridDim.x'th row, kVecs vectors of each a thread, as add_rms_norm's has.
template <typename T, int kVecs, Sum kSum>
__global__ void __launch_bounds__(kMaxThreads, 1) all_reduce_and_norm(const __grid_constant__ AllReduceAddNorm<T> p) {
  constexpr int kWidth = kVecWidth<T>;
  const T* x = static_cast<const T*>(p.x.of[blockIdx.y]);
  const T* added = static_cast<const T*>(p.residual.of[blockIdx.y]);
  T* out = static_cast<T*>(p.out.of[blockIdx.y]);
  const RowNorm<T> norm{x,      added,    p.weight, out,      static_cast<T*>(p.total.of[blockIdx.y]),
                        p.rows, p.hidden, p.hidden, p.hidden, p.eps};
  const int64_t vecs = p.hidden / kWidth;
  const auto for_vecs = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = threadIdx.x + i * blockDim.x;
      if (vec < vecs) f(i, vec * kWidth);
    }
  };
  Vec<T, kWidth> values[kVecs], residual[kVecs], weight[kVecs];
  start_successor();
  for_vecs([&](int i, int at) { weight[i] = load<kWidth>(p.weight + at); });  // no step writes weights
  wait_for_predecessor();
  PeerBlock peers(p.ranks);
  T* own = peers.template input<T>(peers.rank());
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x)
    for_vecs([&](int, int at) { store(own + row * p.hidden + at, load<kWidth>(x + row * p.hidden + at)); });
  peers.template meet<0>();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    for_vecs([&](int i, int at) {
      residual[i] = load<kWidth>(added + row * p.hidden + at);
      values[i] = sum_of(peers.template inputs<T>(row * p.hidden + at), peers.num_ranks());
    });
    norm_held_row<kVecs, kSum, Weight::kPlain>(
        norm, row, values, residual, weight,
        [&](int, int vec, const Vec<T, kWidth>& result) { store(out + row * p.hidden + vec * kWidth, result); });
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
      const auto kernel = p.unrounded ? all_reduce_and_norm<T, each.value, Sum::kUnrounded>
                                      : all_reduce_and_norm<T, each.value, Sum::kRounded>;
      const int64_t blocks = smaller(p.rows, p.max_blocks);
      return static_cast<int>(launch_ranks(kernel, blocks, p.num_local, threads, p.stream, call));
    });
  });
}

}  // namespace lamina
