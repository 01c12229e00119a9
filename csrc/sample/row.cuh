// A row of logits as chunks of 256 tokens, each read by one warp.
#pragma once

#include "launch.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kWarp = 32, kChunk = 256, kEach = kChunk / kWarp;  // tokens a chunk, and of it a lane
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.44269504f, kLargest = 3.402823466e38f;

template <typename T>
struct Sample {
  const T* logits;                           // [num_rows, num_ids and perhaps more], rows row_stride apart
  const float *temperature, *top_p, *min_p;  // [num_rows], as top_k, seeds, positions and out
  const int32_t* top_k;
  const int64_t *seeds, *positions;
  const int32_t* banned;  // [num_rows, num_banned], -1: none
  float2* chunks;         // [num_rows, num_chunks]: the largest logit, the summed odds relative to it
  int32_t* out;
  int64_t row_stride;
  int num_rows, num_ids, num_chunks, num_banned, id_bits;
};

// Largest of two, NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 2^x within 2 ulp; 0 where x is below -126.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / temperature, finite so that a gap of 0 stays 0.
__device__ __forceinline__ float sharpness_of(float temperature) { return fminf(__frcp_rn(temperature), kLargest); }

__device__ __forceinline__ float odds_of(float gap) { return fast_exp2(-gap * kLog2E); }

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// What a lane holds of a chunk, read kWidth neighbours at a time.
template <typename T, int kWidth>
struct Piece {
  Vec<T, kWidth> vecs[kEach / kWidth];

  // Which token of the chunk a lane's i-th is.
  __device__ __forceinline__ static int token(int i) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    return i / kWidth * kWidth * kWarp + lane * kWidth + i % kWidth;
  }

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
  __device__ __forceinline__ void unpack(float (&values)[kEach], const Sample<T>& args, int row, int chunk) const {
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
    ban(values, args, row, chunk);
  }

  __device__ __forceinline__ static void ban(float (&values)[kEach], const Sample<T>& args, int row, int chunk) {
    for (int first = 0; first < args.num_banned; first += kWarp) {
      const int i = first + static_cast<int>(threadIdx.x % kWarp);
      const int id = i < args.num_banned ? args.banned[static_cast<int64_t>(row) * args.num_banned + i] : -1;
      unsigned hits = __ballot_sync(kAllLanes, id >= 0 && id / kChunk == chunk);
      for (; hits != 0; hits &= hits - 1) {
        const int hit = __shfl_sync(kAllLanes, id, __ffs(static_cast<int>(hits)) - 1) % kChunk;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (token(j) == hit) values[j] = -INFINITY;
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
