// Top-k, top-p and min-p of a row by histograms (radix selection), without a sort; one block a row.
//
// Tokens are ordered by rank: the bits of the gap (largest logit - logit) / temperature, which sort as the gap does,
// then the id. The last token to keep is found by dividing the interval of ranks that holds it into bins: the bin in
// which the running sum of weights reaches the goal is the next interval. The first bins are of equal gaps, which
// leaves some hundred tokens of even the flattest row; then these are gathered, and what is surely kept is summed, in
// one more reading of the row. More rounds, of equal parts of the ranks, are for rows of many equal logits. A weight is
// 1 for top-k and the token's odds as an integer for top-p, so sums have no order. Where the largest tokens of the
// chunks reach the goal by themselves, only chunks whose largest is in the interval are read at all.
#pragma once

#include "histogram.cuh"

namespace lamina {

template <typename T, int kWidth>
struct Filter {
  const Sample<T>& args;
  Shared& shared;
  float* gaps;    // [num_chunks], of the largest token of each chunk
  float* masses;  // [num_chunks], the summed odds of the tokens that are kept
  int row;
  const Bans& bans;
  float largest, sharpness;

  __device__ __forceinline__ float gap_of(float logit) const { return (largest - logit) * sharpness; }
  __device__ __forceinline__ bool may_hold(int chunk, Rank last) const { return rank_of(gaps[chunk], 0) <= last; }

  template <typename IsLive>
  __device__ __forceinline__ int next_live(int chunk, const IsLive& is_live) const {
    while (chunk < args.num_chunks && !is_live(chunk)) chunk += kWarps;
    return chunk;
  }

  // function(chunk, the gaps of a lane's tokens) for each chunk that is live, a warp a chunk.
  template <typename IsLive, typename Function>
  __device__ __forceinline__ void for_chunks(const IsLive& is_live, const Function& function) const {
    Piece<T, kWidth> pieces[kAhead];
    int chunks[kAhead];
    int next = next_live(static_cast<int>(threadIdx.x / kWarp), is_live);
    const auto ask = [&](int i) {
      chunks[i] = next;
      if (next >= args.num_chunks) return;
      pieces[i].read(args, row, next);
      next = next_live(next + kWarps, is_live);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ask(i);
#pragma unroll 1  // less code: a row goes through most of it but once
    while (chunks[0] < args.num_chunks) {
      const int chunk = chunks[0];
      float values[kEach];
      pieces[0].unpack(values, args, bans, chunk);
#pragma unroll
      for (int i = 1; i < kAhead; ++i) pieces[i - 1] = pieces[i], chunks[i - 1] = chunks[i];
      ask(kAhead - 1);
#pragma unroll
      for (int j = 0; j < kEach; ++j) values[j] = gap_of(values[j]);
      function(chunk, values);
    }
  }

  template <typename Function>
  __device__ __forceinline__ void for_tokens(Rank last, const Function& function) const {
    for_chunks([&](int chunk) { return may_hold(chunk, last); },
               [&](int chunk, const float (&values)[kEach]) {
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
      function(rank, gap_in(rank));
    }
  }

  // The largest of a chunk, whose id is not known, as if it were the chunk's last: it ranks no higher.
  template <typename Function>
  __device__ __forceinline__ void for_largest(const Function& function) const {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
      function(rank_of(gaps[i], i * kChunk + kChunk - 1), gaps[i]);
    }
  }

  __device__ __forceinline__ void clear_bins(int count) const {
    for (int i = static_cast<int>(threadIdx.x); i < count / 4; i += kBlock) {
      reinterpret_cast<uint4*>(shared.bins)[i] = {0, 0, 0, 0};
    }
    __syncthreads();
  }

  // Narrows an interval to one of its bins, by the weights of whatever for_each(function(rank, gap)) goes through.
  template <typename Bins, typename ForEach>
  __device__ __forceinline__ Interval narrow(const Interval& interval, const Bins& bins, Weight weight,
                                             const ForEach& for_each) const {
    clear_bins(kBins);
    for_each([&](Rank rank, float gap) {
      if (interval.holds(rank)) atomicAdd(&shared.bins[bins.bin_of(rank, gap)], weight.of(gap));
    });
    __syncthreads();
    return part_found(interval, bins);
  }

  // The same for an interval that holds all tokens, by weights that are quick to find.
  __device__ __forceinline__ Interval narrow_quickly(const Interval& interval, const GapBins& bins,
                                                     QuickWeight weight) const {
    clear_bins(kBins);
    for_tokens(interval.high,
               [&](Rank rank, float gap) { atomicAdd(&shared.bins[bins.bin_of(rank, gap)], weight.of(gap)); });
    __syncthreads();
    return part_found(interval, bins);
  }

  template <typename Bins>
  __device__ __forceinline__ Interval part_found(const Interval& interval, const Bins& bins) const {
    const Found found = find_bin(shared, interval.goal);
    if (!found.is_reached) return {interval.low, interval.high, interval.goal, false};
    const Rank low = bins.first(found.bin);
    return {low > interval.low ? low : interval.low, end_of_ids(min_rank(bins.last(found.bin), interval.high)),
            found.goal, true};
  }

  // The same rank, or a lower one with no token between them: no id is larger than the last.
  __device__ __forceinline__ Rank end_of_ids(Rank rank) const {
    return min_rank(rank, rank_of(gap_in(rank), args.num_chunks * kChunk - 1));
  }

  // Of a lane's tokens, the summed odds of those with gaps below begin, and, a bit each, those from there to end.
  __device__ __forceinline__ static float sum_before(const float (&values)[kEach], float begin, float end,
                                                     unsigned& near) {
    float sum = 0.0f;
    near = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool is_before = values[i] < begin;
      const float odds = odds_of(values[i]);
      if (is_before) sum += odds;
      if (!is_before && values[i] <= end) near |= 1u << i;
    }
    return sum;
  }

  // Puts the tokens of an interval into the list, and sums the odds of those before it into the masses. Where there
  // are too many, returns false, and the interval ends where its tokens do.
  __device__ __forceinline__ bool gather(Interval& interval) const {
    if (threadIdx.x == 0) shared.num_listed = 0;
    forget_beyond(interval.high);
    __syncthreads();
    const float begin = gap_in(interval.low), end = gap_in(interval.high);
    uint32_t nearest = ~0u, farthest = 0;
    for_chunks([&](int chunk) { return may_hold(chunk, interval.high); },
               [&](int chunk, const float (&values)[kEach]) {
                 unsigned near;
                 float sum = sum_before(values, begin, end, near);
                 if (near != 0) {  // seldom
                   near = settle(chunk, values, near, interval, sum);
                   list(chunk, values, near, nearest, farthest);
                 }
                 sum = warp_sum(sum);
                 if (threadIdx.x % kWarp == 0) masses[chunk] = sum;
               });
    __syncthreads();
    if (shared.num_listed <= kListed) return true;
    narrow_to(interval, nearest, farthest);
    return false;
  }

  __device__ __forceinline__ static Rank rank_of_own(int chunk, const float (&values)[kEach], int i) {
    return rank_of(values[i], chunk * kChunk + Piece<T, kWidth>::token(i));
  }

  // Which of the tokens near an interval are in it; adds the odds of those before it.
  __device__ __forceinline__ static unsigned settle(int chunk, const float (&values)[kEach], unsigned near,
                                                    const Interval& interval, float& sum) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((near >> i & 1) == 0) continue;
      const Rank rank = rank_of_own(chunk, values, i);
      if (rank < interval.low) sum += odds_of(values[i]);
      if (!interval.holds(rank)) near &= ~(1u << i);
    }
    return near;
  }

  __device__ __forceinline__ void list(int chunk, const float (&values)[kEach], unsigned hits, uint32_t& nearest,
                                       uint32_t& farthest) const {
    const volatile int& num_listed = shared.num_listed;
    int index = hits != 0 && num_listed <= kListed ? atomicAdd(&shared.num_listed, __popc(hits)) : kListed;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((hits >> i & 1) == 0) continue;
      nearest = min(nearest, __float_as_uint(values[i])), farthest = max(farthest, __float_as_uint(values[i]));
      if (index < kListed) shared.list[index] = rank_of_own(chunk, values, i);
      ++index;
    }
  }

  // Ends an interval at the nearest and farthest gaps that any thread saw in it, as bits.
  __device__ __forceinline__ void narrow_to(Interval& interval, uint32_t nearest, uint32_t farthest) const {
    if (threadIdx.x < 2) shared.totals[threadIdx.x] = threadIdx.x == 0 ? ~0u : 0;
    __syncthreads();
    nearest = __reduce_min_sync(kAllLanes, nearest), farthest = __reduce_max_sync(kAllLanes, farthest);
    if (threadIdx.x % kWarp == 0) atomicMin(&shared.totals[0], nearest), atomicMax(&shared.totals[1], farthest);
    __syncthreads();
    const Rank low = rank_of(__uint_as_float(shared.totals[0]), 0);
    if (low > interval.low) interval.low = low;
    interval.high = min_rank(interval.high, end_of_ids(last_rank(__uint_as_float(shared.totals[1]))));
    __syncthreads();
  }

  // The first rank of the list up to which the weights reach the interval's goal.
  __device__ __forceinline__ Rank pick(Interval interval, Weight weight) const {
    const int count = shared.num_listed;
    if (count > kFew) {
      while (interval.is_reached && interval.low < interval.high) {
        interval = narrow(interval, RankBins(interval), weight, [&](const auto& function) { for_listed(function); });
      }
      return interval.high;
    }
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    if (threadIdx.x == 0) shared.last = interval.high;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kBlock) {
      shared.bins[i] = weight.of(gap_in(shared.list[i]));
    }
    __syncthreads();
    for (int own = static_cast<int>(threadIdx.x / kWarp); own < count; own += kWarps) {
      const Rank rank = shared.list[own];
      uint32_t sum = 0;
      for (int i = lane; i < count; i += kWarp) sum += shared.list[i] <= rank ? shared.bins[i] : 0;
      sum = __reduce_add_sync(kAllLanes, sum);
      if (lane == 0 && sum >= interval.goal && sum - shared.bins[own] < interval.goal) shared.last = rank;
    }
    __syncthreads();
    return shared.last;
  }

  // Lowers last to the first rank up to which the weights reach the goal, where they do; returns whether the masses
  // hold what is kept now.
  __device__ __forceinline__ bool select(Rank& last, uint32_t goal, Weight weight, float reach) const {
    Interval interval{0, last, goal, true};
    const GapBins bins{reach};
    const Interval bound = narrow(interval, bins, weight, [&](const auto& function) { for_largest(function); });
    if (bound.is_reached) interval.high = bound.high;
    bool are_few = bound.is_reached, is_first = true;
    while (interval.is_reached && interval.low < interval.high) {
      if (are_few && gather(interval)) {
        last = pick(interval, weight);
        sum_touched(last);
        return true;
      }
      const auto for_each = [&](const auto& function) { for_tokens(interval.high, function); };
      if (!is_first) {
        interval = narrow(interval, RankBins(interval), weight, for_each);
      } else if (interval.high == everything() && weight.scale >= 1.0f && weight.scale <= kQuickScale) {
        interval = narrow_quickly(interval, bins, {weight.scale});
      } else {
        interval = narrow(interval, bins, weight, for_each);
      }
      are_few = true, is_first = false;
    }
    last = interval.high;
    return false;
  }

  // Sums the odds of the tokens up to the last to keep, of each chunk that is live.
  template <typename IsLive>
  __device__ __forceinline__ void sum_chunks(Rank last, const IsLive& is_live) const {
    const Interval beyond{last + 1, ~Rank{0}, 0, false};
    for_chunks(is_live, [&](int chunk, const float (&values)[kEach]) {
      unsigned near;
      float sum = sum_before(values, gap_in(last), gap_in(last), near);
      if (near != 0) settle(chunk, values, near, beyond, sum);
      sum = warp_sum(sum);
      if (threadIdx.x % kWarp == 0) masses[chunk] = sum;
    });
    __syncthreads();
  }

  // Chunks that hold nothing up to the last to keep have no mass.
  __device__ __forceinline__ void forget_beyond(Rank last) const {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
      if (!may_hold(i, last)) masses[i] = 0.0f;
    }
  }

  __device__ __forceinline__ void sum_kept(Rank last) const {
    forget_beyond(last);
    sum_chunks(last, [&](int chunk) { return may_hold(chunk, last); });
  }

  // Sums anew the chunks of which a token is in the list: gathering left the others right.
  __device__ __forceinline__ void sum_touched(Rank last) const {
    __syncthreads();
    clear_bins((args.num_chunks + 3) / 4 * 4);
    for_listed([&](Rank rank, float) { shared.bins[id_in(rank) / kChunk] = 1; });
    __syncthreads();
    sum_chunks(last, [&](int chunk) { return shared.bins[chunk] != 0; });
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
    Rank last = everything(), summed = last;
#pragma unroll 1
    for (int stage = 0; stage < 3; ++stage) {  // top-k, top-p, min-p, each on what the one before keeps
      if (stage == 0 ? top_k <= 0 || top_k >= args.num_ids : stage == 1 && !(top_p < 1.0f)) continue;
      if (stage == 2) last = min_rank(last, limit_of(min_p));
      if (last != summed) sum_kept(last);
      summed = last;
      if (stage == 2) break;
      const float total = total_mass(), scale = stage == 0 ? 0.0f : scale_of(total);
      const double share = top_p * kReach * total * scale;
      const double goal = stage == 0 ? top_k : fmax(ceil(share), 1.0);
      const float reach = reach_of(total, args.num_ids);
      summed = select(last, static_cast<uint32_t>(goal), {scale}, reach) ? last : ~Rank{0};
    }
    return last;
  }

  __device__ __forceinline__ static Rank everything() { return last_rank(INFINITY); }

  // The last rank that min-p keeps.
  __device__ __forceinline__ static Rank limit_of(float min_p) {
    return min_p > 0.0f ? last_rank(fmaxf(static_cast<float>(-log(min_p * kReach)), 0.0f)) : everything();
  }
};

}  // namespace lamina
