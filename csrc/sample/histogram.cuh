// Radix selection's parts: intervals of ranks, ways to divide them into bins of a histogram, and the weights that bins
// add up; one block a row.
#pragma once

#include "row.cuh"

namespace lamina {

constexpr int kBlock = 1024, kWarps = kBlock / kWarp;
constexpr int kBinBits = 14, kBins = 1 << kBinBits;
constexpr int kBinsEach = kWarp * kWarp, kScanners = kBins / kBinsEach;  // a warp scans its bins as a square
constexpr int kListed = 2048;                                            // tokens gathered at most
constexpr int kFew = 256;                                                // of which each is compared with each
constexpr int kAhead = 2;                                                // chunks that a warp has asked for
constexpr int kIdBits = 32;
constexpr double kReach = 1 - 0x1p-20;   // of a share is enough: what lies exactly at it may be rounded below
constexpr float kRoom = 1.0005f;         // for what rounding may add to a sum of 2^20 weights
constexpr float kQuickScale = 1u << 22;  // up to which weights are integers of fewer bits than a float's
static_assert(kScanners <= kWarps, "every bin has a warp");

using Rank = uint64_t;

__device__ __forceinline__ Rank rank_of(float gap, int id) {
  return static_cast<Rank>(__float_as_uint(gap)) << kIdBits | static_cast<uint32_t>(id);
}
__device__ __forceinline__ uint32_t bits_of(Rank rank) { return static_cast<uint32_t>(rank >> kIdBits); }
__device__ __forceinline__ float gap_in(Rank rank) { return __uint_as_float(bits_of(rank)); }
__device__ __forceinline__ int id_in(Rank rank) { return static_cast<int>(rank); }
__device__ __forceinline__ Rank last_rank(float gap) { return rank_of(gap, -1); }
__device__ __forceinline__ Rank min_rank(Rank a, Rank b) { return a < b ? a : b; }

// Ranks from low to high, both inside, and the sum of weights to be reached within them.
struct Interval {
  Rank low, high;
  uint32_t goal;
  bool is_reached;  // false: all weights of the interval together do not reach the goal

  __device__ __forceinline__ bool holds(Rank rank) const { return rank - low <= high - low; }
};

// The bin in which a running sum reaches its goal, and what of the goal is left for it.
struct Found {
  int bin;
  uint32_t goal;
  bool is_reached;
};

struct Shared {
  uint32_t bins[kBins];
  Rank list[kListed];
  uint64_t partial[kWarps];
  uint32_t totals[kWarps];  // of the bins of a warp; of warps
  Found found;
  Rank last;
  int num_listed, row;
};

// Parts of equal gaps: the first kBins of what lies below the reach, a power of two, and all beyond in the last.
struct GapBins {
  float reach;

  // The mantissa of gap + reach, in steps of reach / 2^23, rounded to even.
  __device__ __forceinline__ int bin_of(Rank, float gap) const {
    const uint32_t first = __float_as_uint(reach), last = first + (1u << 23) - 1;
    const uint32_t bits = min(__float_as_uint(gap + reach), last);
    return static_cast<int>(bits >> (23 - kBinBits)) - static_cast<int>(first >> (23 - kBinBits));
  }
  // A bin begins half a step early, as ties round to even.
  __device__ __forceinline__ Rank first(int bin) const {
    const float steps = static_cast<float>((bin << (24 - kBinBits)) - 1);
    return bin == 0 ? 0 : rank_of(steps * (reach * 0x1p-24f), 0);
  }
  __device__ __forceinline__ Rank last(int bin) const { return bin == kBins - 1 ? ~Rank{0} : first(bin + 1) - 1; }
};

// Equal parts of an interval of ranks.
struct RankBins {
  Rank low;
  int shift;

  __device__ __forceinline__ explicit RankBins(const Interval& interval) : low(interval.low) {
    const int width = 64 - __clzll(static_cast<int64_t>(interval.high - interval.low));
    shift = width > kBinBits ? width - kBinBits : 0;
  }
  __device__ __forceinline__ int bin_of(Rank rank, float) const { return static_cast<int>((rank - low) >> shift); }
  __device__ __forceinline__ Rank first(int bin) const { return low + (static_cast<Rank>(bin) << shift); }
  __device__ __forceinline__ Rank last(int bin) const { return first(bin) + ((Rank{1} << shift) - 1); }
};

// Each thread's value summed over the lanes up to its own.
__device__ __forceinline__ uint32_t running_sum(uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

__device__ __forceinline__ int first_lane(bool is_it) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, is_it))) - 1;
}

// The bin in which the running sum of the filled bins reaches the goal.
__device__ __noinline__ Found find_bin(Shared& shared, uint32_t goal) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const bool scans = warp < kScanners;
  const uint32_t* bins = shared.bins + (scans ? warp : 0) * kBinsEach;
  uint32_t line = 0;  // a lane adds a line of the square, each lane in a bank of its own
#pragma unroll
  for (int i = 0; i < kWarp; ++i) line += bins[lane * kWarp + (lane + i) % kWarp];
  line = running_sum(line);
  if (lane == kWarp - 1) shared.totals[warp] = line;
  if (threadIdx.x == 0) shared.found = {0, goal, false};
  __syncthreads();
  uint32_t before = 0;
  for (int i = 0; i < warp; ++i) before += shared.totals[i];
  if (scans && before < goal && goal - before <= shared.totals[warp]) {
    const uint32_t wanted = goal - before;
    const int first = first_lane(line >= wanted);
    const uint32_t earlier = __shfl_sync(kAllLanes, line, first == 0 ? 0 : first - 1);
    const uint32_t own = bins[first * kWarp + lane], sum = (first == 0 ? 0 : earlier) + running_sum(own);
    if (lane == first_lane(sum >= wanted)) {
      shared.found = {warp * kBinsEach + first * kWarp + lane, wanted - (sum - own), true};
    }
  }
  __syncthreads();
  return shared.found;
}

// What a token counts for: its odds as an integer, or 1 where scale is 0.
struct Weight {
  float scale;
  __device__ __forceinline__ uint32_t of(float gap) const {
    return scale == 0.0f ? 1 : __float2uint_rn(odds_of(gap) * scale);
  }
};

// The same for scales from 1 to kQuickScale, rounded by an addition: conversions are slow.
struct QuickWeight {
  float scale;
  __device__ __forceinline__ uint32_t of(float gap) const {
    return __float_as_uint(__fmaf_rn(odds_of(gap), scale, 0x1p23f)) - 0x4b000000u;
  }
};

// A power of two, so that tokens as likely as the likeliest count for exactly as much as they weigh, and the largest
// with which the weights of a row of this total add up to less than 2^32.
__device__ __forceinline__ float scale_of(float total) {
  const uint32_t exponent = (__float_as_uint(total * kRoom) >> 23) - 126;  // total * kRoom < 2^exponent
  return __uint_as_float((127 + 32 - exponent) << 23);
}

// The gaps that the first bins are to reach, a power of two: several times the mean surprise of so many odds' total.
__device__ __forceinline__ float reach_of(float total, int num_ids) {
  const float mean = __log2f(static_cast<float>(num_ids) / total);
  return exp2f(ceilf(log2f(fminf(fmaxf(4.0f * mean, 0x1p-20f), 32.0f))));
}

}  // namespace lamina
