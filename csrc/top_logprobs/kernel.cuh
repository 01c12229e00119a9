// Of each row of logits: log-probabilities of one token and of the likeliest ones, and that token's rank.
#pragma once

#include <cfloat>
#include <climits>

#include "reduce.cuh"

namespace lamina {

constexpr int kReportThreads = 1024;  // one block a row

template <typename T>
struct TopLogprobs {
  const T* logits;
  int64_t row_stride;
  const int32_t* token_ids;
  int32_t* ids;     // [rows, 1 + num_top]
  float* logprobs;  // likewise
  int32_t* ranks;   // [rows]
  int num_rows, num_ids, num_top;
};

// As the caller packs them: 8 bytes each, the stride in elements.
struct TopLogprobsArguments {
  const void* logits;
  int64_t row_stride;
  const int32_t* token_ids;
  int32_t* ids;
  float* logprobs;
  int32_t* ranks;
  int64_t num_rows, num_ids, num_top, dtype;
  cudaStream_t stream;
};

template <typename T>
TopLogprobs<T> unpacked(const TopLogprobsArguments& p) {
  return {static_cast<const T*>(p.logits),
          p.row_stride,
          p.token_ids,
          p.ids,
          p.logprobs,
          p.ranks,
          narrow(p.num_rows),
          narrow(p.num_ids),
          narrow(p.num_top)};
}

// A number that orders logits by value and equal ones by id, the lower first; no two of a row are equal.
__device__ __forceinline__ int64_t report_key(float logit, int id) {
  const int bits = __float_as_int(logit + 0.0f);  // -0 is 0
  const int ordered = bits ^ ((bits >> 31) & INT_MAX);
  return static_cast<int64_t>(ordered) * (int64_t{1} << 32) - id;
}

__device__ __forceinline__ int report_id(int64_t key) { return static_cast<int>(static_cast<uint32_t>(-key)); }

__device__ __forceinline__ float report_logit(int64_t key) {
  const int ordered = static_cast<int>((key + report_id(key)) >> 32);
  return __int_as_float(ordered ^ ((ordered >> 31) & INT_MAX));
}

// What is not finite cannot be written as JSON: the formula has the same number.
__device__ __forceinline__ float report_finite(float logprob) { return fabsf(logprob) <= FLT_MAX ? logprob : -9999.0f; }

// A thread has at most ceil(num_ids / threads) tokens, and num_top threads have one among the likeliest of all
// threads' likeliest, so that many times num_top is all that can reach the last of these.
inline int64_t report_candidates(int64_t num_ids, int64_t num_top) {
  return num_top * ((num_ids + kReportThreads - 1) / kReportThreads);
}

struct ReportShared {
  union {
    float floats[kReportThreads];
    int ints[kReportThreads];
  };
  int64_t last;  // the key that num_top threads reach
  int num_candidates;
};

// Shared memory of a block: room for every candidate, and before for every thread's likeliest.
inline size_t report_bytes(int64_t num_ids, int64_t num_top) {
  const int64_t most = report_candidates(num_ids, num_top);
  return sizeof(ReportShared) + static_cast<size_t>(most > kReportThreads ? most : kReportThreads) * sizeof(int64_t);
}

template <typename T>
__global__ void __launch_bounds__(kReportThreads) top_logprobs_kernel(TopLogprobs<T> args) {
  extern __shared__ int64_t report_memory[];
  auto& shared = *reinterpret_cast<ReportShared*>(report_memory);
  int64_t* candidates = report_memory + sizeof(ReportShared) / sizeof(int64_t);
  int64_t* best = candidates;  // every thread's likeliest, until there are candidates
  const T* logits = args.logits + blockIdx.x * args.row_stride;
  const int own = args.token_ids[blockIdx.x], width = 1 + args.num_top;
  int32_t* ids = args.ids + static_cast<int64_t>(blockIdx.x) * width;
  float* logprobs = args.logprobs + static_cast<int64_t>(blockIdx.x) * width;
  const bool is_padding = own < 0 || own >= args.num_ids;
  const float own_logit = is_padding ? 0.0f : static_cast<float>(logits[own]);
  const int64_t own_key = report_key(own_logit, own);

  float largest = -INFINITY;
  int64_t likeliest = INT64_MIN;
  int num_before = 0;
  for (int id = threadIdx.x; id < args.num_ids; id += kReportThreads) {
    const float logit = static_cast<float>(logits[id]);
    const int64_t key = report_key(logit, id);
    largest = fmaxf(largest, logit);
    likeliest = key > likeliest ? key : likeliest;
    num_before += key > own_key;
  }
  largest = combine_threads<kReportThreads>(largest, shared.floats, [](float a, float b) { return fmaxf(a, b); });
  num_before = combine_threads<kReportThreads>(num_before, shared.ints, [](int a, int b) { return a + b; });
  best[threadIdx.x] = likeliest;
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  int num_better = 0;
  for (int other = 0; other < kReportThreads; ++other) num_better += best[other] > likeliest;
  if (likeliest != INT64_MIN && num_better == args.num_top - 1) shared.last = likeliest;
  __syncthreads();

  float sum = 0.0f;
  for (int id = threadIdx.x; id < args.num_ids; id += kReportThreads) {
    const float logit = static_cast<float>(logits[id]);
    sum += expf(logit - largest);
    if (args.num_top > 0 && report_key(logit, id) >= shared.last) {
      candidates[atomicAdd(&shared.num_candidates, 1)] = report_key(logit, id);
    }
  }
  sum = combine_threads<kReportThreads>(sum, shared.floats, [](float a, float b) { return a + b; });
  const float log_sum = logf(sum);  // NaN where any logit is, or is infinite, or all are -inf
  if (threadIdx.x == 0) {
    ids[0] = own;
    logprobs[0] = is_padding ? -9999.0f : report_finite(own_logit - largest - log_sum);
    args.ranks[blockIdx.x] = sum != sum ? 0 : is_padding ? args.num_ids + 1 : num_before + 1;
  }
  for (int index = threadIdx.x; index < shared.num_candidates; index += kReportThreads) {
    const int64_t key = candidates[index];
    int rank = 1;
    for (int other = 0; other < shared.num_candidates; ++other) rank += candidates[other] > key;
    if (rank > args.num_top) continue;
    ids[rank] = report_id(key);
    logprobs[rank] = report_finite(report_logit(key) - largest - log_sum);
  }
}

}  // namespace lamina
