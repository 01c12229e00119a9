// What top-k, top-p and min-p leave of a row, by histograms and without a sort; one block a row.
//
// Tokens are ordered by rank: the bits of the gap (largest logit - logit) / temperature, which sort as the gap does,
// then the id. The last token to keep is found by cutting the interval of ranks that holds it into as many equal
// parts as there are bins, again and again: the part in which the running sum of weights reaches the goal is the
// next interval. A weight is 1 for top-k and the token's odds as an integer for top-p, so sums have no order. Once
// the interval holds few tokens, these are gathered and the row is read no more. Where the largest tokens of the
// chunks reach the goal by themselves, only chunks whose largest is in the interval are read at all.
#pragma once

#include "row.cuh"

namespace lamina {

constexpr int kBlock = 1024, kWarps = kBlock / kWarp;
constexpr int kBinBits = 14, kBins = 1 << kBinBits;  // 64 to every doubling of the gap in the first cut
constexpr int kBinsEach = kWarp * kWarp, kScanners = kBins / kBinsEach;  // a warp scans its bins as a square
constexpr int kListed = 2048;                                            // tokens gathered at most
constexpr int kAhead = 2;                                                // chunks that a warp has asked for
constexpr float kRoom = 1.0005f;  // for what rounding may add to a sum of 2^20 weights
static_assert(kScanners <= kWarps, "every bin has a warp");

using Rank = uint64_t;

// Ranks from low to high, both inside, and the sum of weights to be reached within them.
struct Interval {
  Rank low, high;
  uint32_t goal;
  bool is_reached;  // false: all weights of the interval together do not reach the goal

  __device__ __forceinline__ bool holds(Rank rank) const { return rank - low <= high - low; }
};

struct Shared {
  uint32_t bins[kBins];
  Rank list[kListed];
  uint64_t partial[kWarps];
  uint32_t totals[kWarps];  // of the bins of a warp; of warps
  Interval found;
  int num_listed;
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
__device__ __noinline__ Interval find_bin(Shared& shared, const Interval& interval, int shift) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const bool scans = warp < kScanners;
  const uint32_t* bins = shared.bins + (scans ? warp : 0) * kBinsEach;
  uint32_t line = 0;  // a lane adds a line of the square, each lane in a bank of its own
#pragma unroll
  for (int i = 0; i < kWarp; ++i) line += bins[lane * kWarp + (lane + i) % kWarp];
  line = running_sum(line);
  if (lane == kWarp - 1) shared.totals[warp] = line;
  if (threadIdx.x == 0) shared.found = {interval.low, interval.high, interval.goal, false};
  __syncthreads();
  uint32_t before = 0;
  for (int i = 0; i < warp; ++i) before += shared.totals[i];
  if (scans && before < interval.goal && interval.goal - before <= shared.totals[warp]) {
    const uint32_t wanted = interval.goal - before;
    const int first = first_lane(line >= wanted);
    const uint32_t earlier = __shfl_sync(kAllLanes, line, first == 0 ? 0 : first - 1);
    const uint32_t own = bins[first * kWarp + lane], sum = (first == 0 ? 0 : earlier) + running_sum(own);
    if (lane == first_lane(sum >= wanted)) {
      const Rank low = interval.low + (static_cast<Rank>(warp * kBinsEach + first * kWarp + lane) << shift);
      const Rank last = low + ((Rank{1} << shift) - 1);
      shared.found = {low, last < interval.high ? last : interval.high, wanted - (sum - own), true};
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

// A power of two, so that tokens as likely as the likeliest count for exactly as much as they weigh, and the largest
// with which the weights of a row of this total add up to less than 2^32.
__device__ __forceinline__ float scale_of(float total) {
  const uint32_t exponent = (__float_as_uint(total * kRoom) >> 23) - 126;  // total * kRoom < 2^exponent
  return __uint_as_float((127 + 32 - exponent) << 23);
}

template <typename T, int kWidth>
struct Filter {
  const Sample<T>& args;
  Shared& shared;
  float* gaps;    // [num_chunks], of the largest token of each chunk
  float* masses;  // [num_chunks], the summed odds of the tokens that are kept
  int row;
  float largest, sharpness;

  __device__ __forceinline__ float gap_of(float logit) const { return (largest - logit) * sharpness; }
  __device__ __forceinline__ Rank rank_of(float gap, int id) const {
    return static_cast<Rank>(__float_as_uint(gap)) << args.id_bits | static_cast<Rank>(id);
  }
  __device__ __forceinline__ Rank last_rank(float gap) const { return rank_of(gap, (1 << args.id_bits) - 1); }

  __device__ __forceinline__ int next_live(int chunk, Rank last) const {
    while (chunk < args.num_chunks && rank_of(gaps[chunk], 0) > last) chunk += kWarps;
    return chunk;
  }

  // function(chunk, the gaps of a lane's tokens) for each chunk that may hold ranks up to the last, a warp a chunk.
  template <typename Function>
  __device__ __forceinline__ void for_chunks(Rank last, const Function& function) const {
    Piece<T, kWidth> pieces[kAhead];
    int chunks[kAhead], next = next_live(static_cast<int>(threadIdx.x / kWarp), last);
    const auto ask = [&](int i) {
      chunks[i] = next;
      if (next >= args.num_chunks) return;
      pieces[i].read(args, row, next);
      next = next_live(next + kWarps, last);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ask(i);
    while (true) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = chunks[i];
        if (chunk >= args.num_chunks) return;
        float values[kEach];
        pieces[i].unpack(values, args, row, chunk);
        ask(i);
#pragma unroll
        for (int j = 0; j < kEach; ++j) values[j] = gap_of(values[j]);
        function(chunk, values);
      }
    }
  }

  template <typename Function>
  __device__ __forceinline__ void for_tokens(Rank last, const Function& function) const {
    for_chunks(last, [&](int chunk, const float (&values)[kEach]) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        function(rank_of(values[i], chunk * kChunk + Piece<T, kWidth>::token(i)), values[i]);
      }
    });
  }

  template <typename Function>
  __device__ __forceinline__ void for_listed(const Function& function) const {
    for (int i = static_cast<int>(threadIdx.x); i < shared.num_listed; i += kBlock) {
      const Rank rank = shared.list[i];
      function(rank, __uint_as_float(static_cast<uint32_t>(rank >> args.id_bits)));
    }
  }

  // The largest of a chunk, whose id is not known, as if it were the chunk's last: it ranks no higher.
  template <typename Function>
  __device__ __forceinline__ void for_largest(const Function& function) const {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
      function(rank_of(gaps[i], i * kChunk + kChunk - 1), gaps[i]);
    }
  }

  // Cuts an interval once, by the weights of whatever for_each(function(rank, gap)) goes through.
  template <typename ForEach>
  __device__ __forceinline__ Interval narrow(const Interval& interval, Weight weight, const ForEach& for_each) const {
    const int width = 64 - __clzll(static_cast<int64_t>(interval.high - interval.low));
    const int shift = width > kBinBits ? width - kBinBits : 0;
    for (int i = static_cast<int>(threadIdx.x); i < kBins / 4; i += kBlock) {
      reinterpret_cast<uint4*>(shared.bins)[i] = {0, 0, 0, 0};
    }
    __syncthreads();
    for_each([&](Rank rank, float gap) {
      if (interval.holds(rank)) atomicAdd(&shared.bins[(rank - interval.low) >> shift], weight.of(gap));
    });
    __syncthreads();
    return find_bin(shared, interval, shift);
  }

  // Puts the tokens of an interval into the list; false where there are too many.
  __device__ __forceinline__ bool gather(const Interval& interval) const {
    const unsigned lane = threadIdx.x % kWarp;
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    volatile int& num_listed = shared.num_listed;
    for_chunks(interval.high, [&](int chunk, const float (&values)[kEach]) {
      if (__shfl_sync(kAllLanes, num_listed, 0) > kListed) return;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Rank rank = rank_of(values[i], chunk * kChunk + Piece<T, kWidth>::token(i));
        const bool is_in = interval.holds(rank);
        const unsigned hits = __ballot_sync(kAllLanes, is_in);
        if (hits == 0) continue;
        int place = lane == 0 ? atomicAdd(&shared.num_listed, __popc(hits)) : 0;
        place = __shfl_sync(kAllLanes, place, 0) + __popc(hits & ((1u << lane) - 1));
        if (is_in && place < kListed) shared.list[place] = rank;
      }
    });
    __syncthreads();
    return shared.num_listed <= kListed;
  }

  // The first rank up to which the weights reach the goal, or the last if none does.
  __device__ __forceinline__ Rank select(Rank last, uint32_t goal, Weight weight) const {
    Interval interval{0, last, goal, true};
    const Interval bound = narrow(interval, weight, [&](const auto& function) { for_largest(function); });
    if (bound.is_reached) interval.high = bound.high;
    for (bool are_few = bound.is_reached; interval.is_reached && interval.low < interval.high; are_few = true) {
      if (are_few && gather(interval)) break;
      interval = narrow(interval, weight, [&](const auto& function) { for_tokens(interval.high, function); });
    }
    while (interval.is_reached && interval.low < interval.high) {
      interval = narrow(interval, weight, [&](const auto& function) { for_listed(function); });
    }
    return interval.high;
  }

  // Sums the odds of each chunk's tokens up to the last to keep.
  __device__ __forceinline__ void sum_kept(Rank last) const {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
      if (rank_of(gaps[i], 0) > last) masses[i] = 0.0f;
    }
    for_chunks(last, [&](int chunk, const float (&values)[kEach]) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Rank rank = rank_of(values[i], chunk * kChunk + Piece<T, kWidth>::token(i));
        sum += rank <= last ? odds_of(values[i]) : 0.0f;
      }
      sum = warp_sum(sum);
      if (threadIdx.x % kWarp == 0) masses[chunk] = sum;
    });
    __syncthreads();
  }

  __device__ __forceinline__ float total_mass() const {
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) sum += masses[i];
    sum = warp_sum(sum);
    float* partial = reinterpret_cast<float*>(shared.totals);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < kWarps; ++i) sum += partial[i];
    __syncthreads();
    return sum;
  }

  // Applies the filters to the masses, which hold every token's odds; returns the last rank to keep.
  __device__ __forceinline__ Rank apply() const {
    const int top_k = args.top_k[row];
    const float top_p = args.top_p[row], min_p = args.min_p[row];
    const Rank everything = last_rank(INFINITY);
    Rank last = everything, summed = everything;
#pragma unroll 1
    for (int stage = 0; stage < 3; ++stage) {  // top-k, top-p, min-p, each on what the one before keeps
      if (stage == 0 ? top_k <= 0 || top_k >= args.num_ids : stage == 1 && !(top_p < 1.0f)) continue;
      if (stage == 2) last = min_rank(last, limit_of(min_p));
      if (last != summed) sum_kept(last);
      summed = last;
      if (stage == 2) break;
      const float total = stage == 0 ? 0.0f : total_mass(), scale = stage == 0 ? 0.0f : scale_of(total);
      const double share = static_cast<double>(top_p) * total * scale;
      const double goal = stage == 0 ? top_k : fmax(ceil(share), 1.0);
      last = select(last, static_cast<uint32_t>(goal), {scale});
    }
    return last;
  }

  // The last rank that min-p keeps.
  __device__ __forceinline__ Rank limit_of(float min_p) const {
    return min_p > 0.0f ? last_rank(fmaxf(static_cast<float>(-log(static_cast<double>(min_p))), 0.0f))
                        : last_rank(INFINITY);
  }

  __device__ __forceinline__ static Rank min_rank(Rank a, Rank b) { return a < b ? a : b; }
};

}  // namespace lamina
