// Rows of x as the norm of a residual sum, made by every block for itself.
#pragma once

#include "hopper.cuh"
#include "pdl.cuh"
#include "stream_shape.cuh"
#include "vec.cuh"

namespace lamina {

template <int threads>
__device__ __forceinline__ void sync_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory");
}

// Where eight columns of a token lie in shared memory, as the products read them.
template <int kTokens>
__device__ __forceinline__ int place_of_run(int run, int token) {
  return (run / kRunsOfTile * kTokens + token) * kColumns * 2 + ((run % kRunsOfTile) ^ (token % 8)) * 16;
}

// Normalises up to kTokens rows of x. A row is shared by as many warps as there are for each.
template <typename T, int kThreads, int kTokens>
__device__ __forceinline__ void norm_rows(const RowNorm<T>& norm, uint8_t* x, T* weight, const Work& work, int step) {
  using Run = Vec<T, kRun>;
  constexpr int kWarps = kThreads / kWarp, kBatch = 4;
  __shared__ float partial[kWarps];
  const int warp = threadIdx.x / kWarp, rows = min(static_cast<int>(norm.rows) - work.token, kTokens);
  const int runs = static_cast<int>(norm.hidden) / kRun;
  const int first = work.begin * step / kRun, last = work.end * step / kRun;  // runs that this block multiplies
  for (int run = first + threadIdx.x; run < min(last, runs); run += kThreads) {
    store_shared(weight + (run - first) * kRun, load<kRun>(norm.weight + run * kRun));
  }
  wait_for_predecessor();
  int warps = kWarps;  // of a row
  while (warps > 1 && kWarps / warps < rows) warps /= 2;
  const int stride = warps * kWarp;
  for (int begin = 0; begin < rows; begin += kWarps / warps) {
    const int row = begin + warp / warps, start = warp % warps * kWarp + threadIdx.x % kWarp;
    const bool inside = row < rows;
    const int64_t token = work.token + row;
    float sum = 0.0f;
    for (int run = start; inside && run < runs; run += kBatch * stride) {
      Run values[kBatch], residual[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (run + i * stride >= runs) continue;
        values[i] = load<kRun>(norm.x + token * norm.x_stride + (run + i * stride) * kRun);
        residual[i] = load<kRun>(norm.residual + token * norm.residual_stride + (run + i * stride) * kRun);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int own = run + i * stride;
        if (own >= runs) continue;
        values[i] = add(values[i], residual[i]);
        sum += sum_of_squares(values[i]);
        if (blockIdx.x == 0) store(norm.total + token * norm.hidden + own * kRun, values[i]);
        if (own >= first && own < last) {
          store_shared(reinterpret_cast<T*>(x + place_of_run<kTokens>(own - first, row)), values[i]);
        }
      }
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % kWarp == 0) partial[warp] = sum;
    sync_multipliers<kThreads>();
    sum = 0.0f;
    for (int i = 0; i < warps; ++i) sum += partial[warp / warps * warps + i];
    const float factor = inverse_rms(norm, sum);
    for (int run = start; inside && run < last; run += stride) {
      if (run < first) continue;
      T* at = reinterpret_cast<T*>(x + place_of_run<kTokens>(run - first, row));
      // columns behind the last meet weights of zero, so they must not be NaN
      store_shared(at, run < runs ? scale(load<kRun>(at), load<kRun>(weight + (run - first) * kRun), factor) : Run{});
    }
    sync_multipliers<kThreads>();
  }
  fence_shared_for_async();
  sync_multipliers<kThreads>();
}

}  // namespace lamina
