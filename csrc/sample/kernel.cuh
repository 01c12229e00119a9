// Token ids out of logits: the largest, or a draw after temperature, top-k, top-p and min-p.
//
// Two launches for every row of a batch, whatever mixture of greedy, random and filtered it is. scan_chunks reads the
// logits once, with as many blocks as there are, and leaves the largest logit of each chunk of 256 tokens and, for
// rows that are drawn, the chunk's summed odds. choose_tokens, one block a row, needs no more of a row that is greedy
// or not filtered than those numbers and one chunk.
#pragma once

#include "select.cuh"

namespace lamina {

constexpr int kScanWarps = 8;

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// kChunks chunks a warp, read before the first is looked at.
template <typename T, int kWidth, int kChunks>
__global__ void __launch_bounds__(kScanWarps* kWarp) scan_chunks(Sample<T> args) {
  let_next_kernel_start();
  const int row = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.x * kScanWarps + threadIdx.x / kWarp) * kChunks;
  Piece<T, kWidth> pieces[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c < args.num_chunks) pieces[c].read(args, row, first + c);
  }
  const float temperature = args.temperature[row];
  const float rate = fminf(sharpness_of(temperature) * kLog2E, kLargest);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c >= args.num_chunks) return;
    float values[kEach];
    pieces[c].unpack(values, args, row, first + c);
    float largest = values[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) largest = max_or_nan(largest, values[i]);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      largest = max_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    }
    float sum = 0.0f;
    if (temperature > 0.0f) {
      const float base = fmaxf(largest, -kLargest);  // -inf - -inf would not be a number
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += fast_exp2((values[i] - base) * rate);
      sum = warp_sum(sum);
    }
    if (threadIdx.x % kWarp == 0) {
      args.chunks[static_cast<int64_t>(row) * args.num_chunks + first + c] = make_float2(largest, sum);
    }
  }
}

// A number that is the larger the larger the score, and among equal scores the lower the index; NaN is largest.
__device__ __forceinline__ uint64_t entry(float score, int index) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 equals 0
  const uint32_t key = score != score ? ~0u : (bits >> 31 ? ~bits : bits | 0x80000000u);
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ int index_of(uint64_t winner) { return static_cast<int>(~static_cast<uint32_t>(winner)); }

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t best_of_warp(uint64_t best) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    best = larger(best, __shfl_xor_sync(kAllLanes, best, offset));
  }
  return best;
}

__device__ __forceinline__ uint64_t best_of_block(uint64_t best, uint64_t (&partial)[kWarps]) {
  best = best_of_warp(best);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = best;
  __syncthreads();
  best = best_of_warp(partial[threadIdx.x % kWarps]);
  __syncthreads();
  return best;
}

// The first chunk to finish a race in which each finishes at its noise over its mass.
__device__ __forceinline__ int race_chunks(const float* masses, int num_chunks, const Noise& noise,
                                           uint64_t (&partial)[kWarps]) {
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < num_chunks; i += kBlock) {
    best = larger(best, entry(__fdiv_rn(masses[i], noise.at(-1 - i)), i));
  }
  return index_of(best_of_block(best, partial));
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kBlock, 1) choose_tokens(Sample<T> args) {
  extern __shared__ uint4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* gaps = reinterpret_cast<float*>(&shared + 1);
  const int row = static_cast<int>(blockIdx.x);
  const float2* chunks = args.chunks + static_cast<int64_t>(row) * args.num_chunks;
  const Noise noise(args.seeds[row], args.positions[row]);
  const float temperature = args.temperature[row], sharpness = sharpness_of(temperature);
  wait_for_kernel_before();
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
    best = larger(best, entry(chunks[i].x, i));
  }
  int chunk = index_of(best_of_block(best, shared.partial));
  const float largest = chunks[chunk].x + 0.0f;  // not -0, so that no gap is
  const bool is_drawn = temperature > 0.0f && fabsf(largest) < INFINITY;
  const Filter<T, kWidth> filter{args, shared, gaps, gaps + args.num_chunks, row, largest, sharpness};
  Rank last = 0;
  if (is_drawn) {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_chunks; i += kBlock) {
      const float2 chunk_of = chunks[i];
      gaps[i] = filter.gap_of(chunk_of.x);
      filter.masses[i] = chunk_of.y * odds_of(gaps[i]);
    }
    __syncthreads();
    last = filter.apply();
    chunk = race_chunks(filter.masses, args.num_chunks, noise, shared.partial);
  }
  if (threadIdx.x >= kWarp) return;
  float values[kEach];
  Piece<T, kWidth> piece;
  piece.read(args, row, chunk);
  piece.unpack(values, args, row, chunk);
  best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int id = chunk * kChunk + piece.token(i);
    float score = values[i];
    if (is_drawn) {
      const float gap = filter.gap_of(values[i]);
      score = __fdiv_rn(filter.rank_of(gap, id) <= last ? expf(-gap) : 0.0f, noise.at(id));
    }
    best = larger(best, entry(score, id));
  }
  const int token = index_of(best_of_warp(best));
  const bool is_broken = temperature > 0.0f && largest != largest;
  if (threadIdx.x == 0) args.out[row] = is_broken ? 0 : token;
}

// Launches a kernel that may start before the one before it ends, and waits for it where it must.
template <typename Kernel, typename Args>
int launch_overlapped(Kernel kernel, dim3 grid, int block, size_t shared_bytes, cudaStream_t stream, const Args& args) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename T, int kWidth>
int sample(const Sample<T>& args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(args.num_rows);
  constexpr int kMany = 4;
  const auto blocks = [&](int chunks) { return static_cast<unsigned>(ceil_div(args.num_chunks, kScanWarps * chunks)); };
  if (args.num_rows >= 16) {
    scan_chunks<T, kWidth, kMany><<<dim3(blocks(kMany), rows), kScanWarps * kWarp, 0, stream>>>(args);
  } else {
    scan_chunks<T, kWidth, 1><<<dim3(blocks(1), rows), kScanWarps * kWarp, 0, stream>>>(args);
  }
  if (const int error = launch_error()) return error;
  const size_t shared_bytes = sizeof(Shared) + 2 * sizeof(float) * static_cast<size_t>(args.num_chunks);
  return launch_overlapped(choose_tokens<T, kWidth>, dim3(rows), kBlock, shared_bytes, stream, args);
}

}  // namespace lamina
