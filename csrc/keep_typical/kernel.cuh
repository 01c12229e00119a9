// -inf for all but the most typical tokens of a row, in place and without a sort; one block a row.
//
// A token's distance is |gap - mean gap|, where its gap is (largest logit - logit) / temperature. Distances are not
// negative, so they sort as their bits do. The distance at which the running mass reaches its goal is found digit by
// digit: a pass adds up the odds of the tokens that agree with the digits found so far, by their next one. Odds are
// added as integers, so that sums have no order.
#pragma once

#include "reduce.cuh"

namespace lamina {

constexpr int kTypicalThreads = 1024, kDigitBits = 11, kDigits = 1 << kDigitBits, kGroup = 32,
              kGroups = kDigits / kGroup;
constexpr int kNumDigits = 3;                   // of 31 bits, the lowest one a bit short
constexpr float kWholeOdds = 1099511627776.0f;  // 2^40, the odds of the likeliest token as an integer
constexpr float kLargestFloat = 3.402823466e38f;
using Mass = unsigned long long;

struct Typical {
  float* logits;  // [num_rows, vocab], rows row_stride apart
  const float *temperature, *typical_p;
  int64_t row_stride;
  int vocab;
};

// As the caller packs them: 8 bytes each, the stride in elements.
struct KeepTypicalArguments {
  float* logits;
  const float *temperature, *typical_p;
  int64_t row_stride, num_rows, vocab;
  cudaStream_t stream;
};

inline Typical unpacked(const KeepTypicalArguments& p) {
  return {p.logits, p.temperature, p.typical_p, p.row_stride, narrow(p.vocab)};
}

struct TypicalShared {
  Mass sums[kDigits], groups[kGroups];
  union {
    double doubles[kTypicalThreads];
    float floats[kTypicalThreads];
  };
  uint32_t prefix;
  Mass goal;
};

// The sum of all threads' values, always added in the same order.
__device__ __forceinline__ double sum_of_block(double value, double* shared) {
  return combine_threads<kTypicalThreads>(value, shared, [](double a, double b) { return a + b; });
}

struct Distances {
  float largest, sharpness, mean;

  __device__ __forceinline__ float gap(float logit) const { return __fmul_rn(__fsub_rn(largest, logit), sharpness); }
  __device__ __forceinline__ uint32_t bits(float gap) const { return __float_as_uint(fabsf(__fsub_rn(gap, mean))); }
  __device__ __forceinline__ static Mass weight(float gap) {
    return static_cast<Mass>(__float2ull_rn(expf(-gap) * kWholeOdds));
  }
};

// A digit of 31 bits: of which bits it is made, and which are known by then.
struct Digit {
  int shift;
  uint32_t mask, known;

  __device__ explicit Digit(int index) {
    const int left = 31 - kDigitBits * index, bits = left < kDigitBits ? left : kDigitBits;
    shift = left - bits;
    mask = (1u << bits) - 1;
    known = index == 0 ? 0 : ~0u << left;
  }
};

// Adds up the odds of the tokens that agree with the prefix, by their digit.
__device__ __forceinline__ void add_odds(TypicalShared& shared, const Distances& distances, const Digit& digit,
                                         const float* logits, int vocab) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kDigits; i += kTypicalThreads) shared.sums[i] = 0;
  __syncthreads();
  for (int i = thread; i < vocab; i += kTypicalThreads) {
    const float gap = distances.gap(logits[i]);
    const Mass weight = Distances::weight(gap);
    const uint32_t bits = distances.bits(gap);
    if (weight != 0 && ((bits ^ shared.prefix) & digit.known) == 0) {
      atomicAdd(&shared.sums[bits >> digit.shift & digit.mask], weight);
    }
  }
  __syncthreads();
}

// Finds, of the digits' sums, the one in which the running sum reaches the goal; at first, a share of them all.
__device__ __forceinline__ void find_digit(TypicalShared& shared, int shift, bool is_first, float share) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kGroups) {
    Mass sum = 0;
    for (int i = 0; i < kGroup; ++i) sum += shared.sums[thread * kGroup + i];
    shared.groups[thread] = sum;
  }
  __syncthreads();
  if (thread == 0) {
    Mass goal = shared.goal;
    if (is_first) {
      Mass total = 0;
      for (int i = 0; i < kGroups; ++i) total += shared.groups[i];
      goal = static_cast<Mass>(fmax(ceil(static_cast<double>(share) * static_cast<double>(total)), 1.0));
    }
    int digit = 0;
    while (digit < kGroups - 1 && shared.groups[digit] < goal) goal -= shared.groups[digit++];
    digit *= kGroup;
    while (digit < kDigits - 1 && shared.sums[digit] < goal) goal -= shared.sums[digit++];
    shared.prefix |= static_cast<uint32_t>(digit) << shift;
    shared.goal = goal;
  }
  __syncthreads();
}

// The largest logit of a row; infinite where any is broken, or all are -inf.
__device__ __forceinline__ float largest_of_row(TypicalShared& shared, const float* logits, int vocab) {
  float largest = -INFINITY;
  bool is_broken = false;
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kTypicalThreads) {
    largest = fmaxf(largest, logits[i]);
    is_broken |= logits[i] != logits[i];
  }
  return combine_threads<kTypicalThreads>(is_broken ? INFINITY : largest, shared.floats,
                                          [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ float mean_gap(TypicalShared& shared, const Distances& distances, const float* logits,
                                          int vocab) {
  double mass = 0.0, moment = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kTypicalThreads) {
    const float gap = distances.gap(logits[i]), odds = expf(-gap);
    mass += odds;
    if (odds > 0.0f) moment += static_cast<double>(odds) * gap;
  }
  mass = sum_of_block(mass, shared.doubles);
  return static_cast<float>(sum_of_block(moment, shared.doubles) / mass);
}

__global__ void __launch_bounds__(kTypicalThreads) keep_typical_kernel(Typical args) {
  extern __shared__ double typical_memory[];
  TypicalShared& shared = *reinterpret_cast<TypicalShared*>(typical_memory);
  const int64_t row = blockIdx.x;
  const float temperature = args.temperature[row], typical_p = args.typical_p[row];
  if (!(temperature > 0.0f && typical_p < 1.0f)) return;
  float* logits = args.logits + row * args.row_stride;
  const float largest = largest_of_row(shared, logits, args.vocab);
  if (!(fabsf(largest) < INFINITY)) return;
  Distances distances{largest, fminf(__frcp_rn(temperature), kLargestFloat), 0.0f};
  distances.mean = mean_gap(shared, distances, logits, args.vocab);
  if (threadIdx.x == 0) shared.prefix = 0;
  for (int index = 0; index < kNumDigits; ++index) {
    const Digit digit(index);
    add_odds(shared, distances, digit, logits, args.vocab);
    find_digit(shared, digit.shift, index == 0, typical_p);
  }
  for (int i = static_cast<int>(threadIdx.x); i < args.vocab; i += kTypicalThreads) {
    if (distances.bits(distances.gap(logits[i])) > shared.prefix) logits[i] = -INFINITY;
  }
}

}  // namespace lamina
