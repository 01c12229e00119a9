// The tokens that followed where the last ones of a row came before: a block a row, each thread some of its places.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"

namespace lamina {

constexpr int kNgramThreads = 512;

struct ProposeNgram {
  const int32_t* tokens;  // of each slot
  int block_size;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t *num_computed, *newest;
  int32_t* out;  // [num_rows, k]
  int64_t num_rows;
  int k, min_ngram, max_ngram;
};

// A row's tokens: those in its blocks, and the newest, which stands at `end`.
struct PagedRow {
  const int32_t *tokens, *table;
  int block_size, end;
  int32_t newest;

  __device__ __forceinline__ int32_t at(int place) const {
    if (place == end) return newest;
    return tokens[static_cast<int64_t>(table[place / block_size]) * block_size + place % block_size];
  }

  // How many tokens up to a place are the row's last ones, at most so many.
  __device__ __forceinline__ int length(int place, int most) const {
    int length = 0;
    while (length < most && length <= place && at(place - length) == at(end - length)) ++length;
    return length;
  }
};

__global__ void __launch_bounds__(kNgramThreads) propose_ngram_kernel(ProposeNgram args) {
  __shared__ unsigned long long found[kNgramThreads];
  const int64_t row = blockIdx.x;
  const PagedRow own{args.tokens, args.block_tables + row * args.table_stride, args.block_size, args.num_computed[row],
                     args.newest[row]};
  unsigned long long best = 0;  // the length of a match, then its place: the last of the longest is the largest
  for (int place = threadIdx.x; place < own.end; place += kNgramThreads) {
    const unsigned long long length = own.length(place, args.max_ngram);
    const unsigned long long match = length << 32 | static_cast<unsigned>(place);
    best = match > best ? match : best;
  }
  best = combine_threads<kNgramThreads>(best, found,
                                        [](unsigned long long a, unsigned long long b) { return a > b ? a : b; });
  const int place = static_cast<int>(best & 0xffffffffu), period = own.end - place;
  const bool is_found = static_cast<int>(best >> 32) >= args.min_ngram;
  for (int i = threadIdx.x; i < args.k; i += kNgramThreads)
    args.out[row * args.k + i] = is_found ? own.at(place + 1 + i % period) : -1;
}

inline int propose_ngram(const ProposeNgram& args, cudaStream_t stream) {
  if (args.num_rows == 0 || args.k == 0) return cudaSuccess;
  propose_ngram_kernel<<<static_cast<unsigned>(args.num_rows), kNgramThreads, 0, stream>>>(args);
  return launch_error();
}

}  // namespace lamina
