// A row of logits as chunks of 256 tokens, each read by one warp.
#pragma once

#include "chunk.cuh"
#include "vec.cuh"

namespace lamina {

template <typename T>
struct Sample {
  const T* logits;                           // [num_rows, num_ids and perhaps more], rows row_stride apart
  const float *temperature, *top_p, *min_p;  // [num_rows], as top_k, seeds and row_indices
  const int32_t* top_k;
  const int64_t *seeds, *row_indices;  // a row's index in positions, banned and out; null: the row itself
  const int64_t* positions;
  const int32_t* banned;  // [any number, num_banned], -1: none
  float2* chunks;         // [num_rows, num_chunks]: the largest logit, the summed odds relative to it
  int32_t* out;
  int64_t row_stride;

  __device__ __forceinline__ int64_t target_row(int row) const {
    return row_indices == nullptr ? row : row_indices[row];
  }

  int num_rows, num_ids, num_chunks, num_banned;
};

// As the caller packs them: 8 bytes each, strides in elements.
struct SampleArguments {
  const void* logits;
  int64_t row_stride;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seeds, *positions;
  const int32_t* banned;
  int64_t num_banned;
  const int64_t* row_indices;
  float2* chunks;
  int64_t are_chunks_known;
  int32_t* out;
  int64_t num_rows, num_ids, is_aligned, dtype;
  cudaStream_t stream;
};

template <typename T>
Sample<T> unpacked(const SampleArguments& p) {
  Sample<T> args;
  args.logits = static_cast<const T*>(p.logits), args.row_stride = p.row_stride;
  args.temperature = p.temperature, args.top_k = p.top_k, args.top_p = p.top_p, args.min_p = p.min_p;
  args.seeds = p.seeds, args.row_indices = p.row_indices, args.positions = p.positions, args.banned = p.banned;
  args.chunks = p.chunks, args.out = p.out;
  args.num_rows = narrow(p.num_rows), args.num_ids = narrow(p.num_ids);
  args.num_chunks = narrow((p.num_ids + kChunk - 1) / kChunk);
  args.num_banned = narrow(p.num_banned);
  return args;
}

__device__ __forceinline__ float odds_of(float gap) { return exp2_fast(-gap * kLog2E); }

// The ids that a row must not choose; a lane holds one of the first.
struct Bans {
  const int32_t* ids;
  int count, first;
  bool are_any;

  template <typename T>
  __device__ __forceinline__ Bans(const Sample<T>& args, int row)
      : ids(args.banned + args.target_row(row) * args.num_banned), count(args.num_banned) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    first = lane < count ? ids[lane] : -1;
    are_any = count > kWarp || __ballot_sync(kAllLanes, first >= 0) != 0;
  }
};

// What a lane holds of a chunk, read kWidth neighbours at a time.
template <typename T, int kWidth>
struct Piece {
  Vec<T, kWidth> vecs[kEach / kWidth];

  __device__ __forceinline__ static int token(int i) { return offset_in_chunk<kWidth>(i); }

  // Vectors that begin beyond the ids are left out; those that end beyond them still lie within the row.
  __device__ __forceinline__ void read(const Sample<T>& args, int row, int chunk) {
    const T* from = args.logits + row * args.row_stride + static_cast<int64_t>(chunk) * kChunk;
    const int left = args.num_ids - chunk * kChunk;
#pragma unroll
    for (int i = 0; i < kEach / kWidth; ++i) {
      const int first = token(i * kWidth);
      if (first < left) vecs[i] = load<kWidth>(from + first);
    }
  }

  // The logits, -inf for those that are not to be chosen.
  __device__ __forceinline__ void unpack(float (&values)[kEach], const Sample<T>& args, const Bans& bans,
                                         int chunk) const {
#pragma unroll
    for (int i = 0; i < kEach / kWidth; ++i) {
      float some[kWidth];
      to_floats(some, vecs[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[i * kWidth + j] = some[j];
    }
    const int left = args.num_ids - chunk * kChunk;
    if (left < kChunk) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (token(i) >= left) values[i] = -INFINITY;
      }
    }
    if (bans.are_any) ban(values, bans, chunk);
  }

  __device__ __forceinline__ static void ban(float (&values)[kEach], const Bans& bans, int chunk) {
    for (int first = 0; first < bans.count; first += kWarp) {
      const int i = first + static_cast<int>(threadIdx.x % kWarp);
      const int id = first == 0 ? bans.first : i < bans.count ? bans.ids[i] : -1;
      unsigned hits = __ballot_sync(kAllLanes, id >= 0 && id / kChunk == chunk);
      for (; hits != 0; hits &= hits - 1) {
        const int hit = __shfl_sync(kAllLanes, id, __ffs(static_cast<int>(hits)) - 1) % kChunk;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (token(j) == hit && values[j] < INFINITY) values[j] = -INFINITY;  // NaN and infinity stay
        }
      }
    }
  }
};

// Exp(1) noise of one row, the same numbers as the formula's: integers up to one logarithm in double precision.
struct Noise {
  uint32_t keys[2];

  __device__ static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  __device__ static uint32_t stir(uint32_t x, int shift, uint32_t factor) { return (x ^ (x >> shift)) * factor; }

  __device__ Noise(int64_t seed, int64_t position) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
    const uint64_t mixed = mix(mix(static_cast<uint64_t>(seed) + kGolden) + static_cast<uint64_t>(position) * kGolden);
    keys[0] = static_cast<uint32_t>(mixed), keys[1] = static_cast<uint32_t>(mixed >> 32);
  }

  __device__ float at(int32_t counter) const {
    uint32_t bits = (static_cast<uint32_t>(counter) * 0x9e3779b9u) ^ keys[0];
    bits = stir(bits, 16, 0x85ebca6bu) + keys[1];
    bits = stir(stir(bits, 13, 0xc2b2ae35u), 16, 0x7feb352du);
    bits = (bits ^ static_cast<uint32_t>(static_cast<int32_t>(bits) >> 15)) & 0x7fffffffu;
    return static_cast<float>(-log((bits + 0.5) * 0x1p-31));
  }
};

}  // namespace lamina
