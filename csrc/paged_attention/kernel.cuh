// Causal attention over a paged KV cache, on raw pointers: mma.sync, cp.async and online softmax, with split-KV
// (flash-decoding).
//
// The rows of a block are the queries that share one key-value head: a group of query heads times some tokens, so that
// keys and values are read once for all of them. A block streams its keys through shared memory by asynchronous copies,
// in one of two ways:
//   few rows (decoding):  each warp streams its own tiles of sixteen keys against the same rows, in step with no other
//                         warp; what the warps found is merged at the end;
//   many rows (prefill):  all warps share each tile of keys, each for rows of its own.
// With few blocks, a sequence's keys are split among several; each leaves its unnormalised rows in a workspace, and the
// last to arrive merges them in order. The splits follow from a sequence's own length and the launch's constants alone,
// so a row's bits do not depend on its neighbours, and a captured launch holds as lengths grow. In a CUDA graph of a
// decode step, keys of earlier steps are loaded before the kernel ahead has ended (PDL).
#pragma once

#include "kv_pipeline.cuh"
#include "pdl.cuh"
#include "warp_softmax.cuh"

namespace lamina {

// The unnormalised result of some keys for four dimensions of one row, merged in the order of the calls.
struct Merged {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
  float max = -INFINITY, sum = 0.0f;

  __device__ __forceinline__ void add(const float4& part, const float2& stats) {
    const float top = fmaxf(max, stats.x), base = top == -INFINITY ? 0.0f : top;
    const float keep = exp2_fast(max - base), weight = exp2_fast(stats.x - base);
    out = {out.x * keep + part.x * weight, out.y * keep + part.y * weight, out.z * keep + part.z * weight,
           out.w * keep + part.w * weight};
    sum = sum * keep + stats.y * weight;
    max = top;
  }
};

__device__ __forceinline__ void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

template <typename T>
__device__ __forceinline__ void store_four(T* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = uint2{pack(x.x, x.y, T{}), pack(x.z, x.w, T{})};
}

template <typename Call>
__device__ __forceinline__ void write_out(const Call& a, const WorkTile& work, int r, int d, const Merged& merged) {
  const int row = work.first_row + r;
  typename Call::T* to =
      a.out + (work.start + row / a.group) * a.out_token + (work.kv_head * a.group + row % a.group) * a.out_head;
  const float factor = a.value_scale / merged.sum;
  const float4 x = merged.out;
  store_four(to + d, float4{x.x * factor, x.y * factor, x.z * factor, x.w * factor});
}

// Calls visit(row, dimension) for every fourth dimension of every row of the block, spread over its threads.
template <typename S, typename Visit>
__device__ __forceinline__ void each_four(int rows, int head_dim, const Visit& visit) {
  constexpr int kFours = S::kDim / 4;
  for (int index = static_cast<int>(threadIdx.x); index < rows * kFours; index += S::kRowThreads) {
    const int d = index % kFours * 4;
    if (d < head_dim) visit(index / kFours, d);
  }
}

// One split's rows in the workspace: [kRows][kDim] sums, then each row's maximum and sum.
template <typename S>
struct Partial {
  float* sums;
  __device__ __forceinline__ Partial(const typename S::Call& a, const WorkTile& work, int split)
      : sums(a.partials + (static_cast<int64_t>(work.unit) * a.num_splits + split) * S::kPartialFloats) {}
  __device__ __forceinline__ float4& sum(int r, int d) const {
    return *reinterpret_cast<float4*>(sums + r * S::kDim + d);
  }
  __device__ __forceinline__ float2& stats(int r) const {
    return reinterpret_cast<float2*>(sums + S::kRows * S::kDim)[r];
  }
};

// Merges what the teams of this block stored in shared memory; to `out`, or to the workspace if other blocks have more.
template <typename S>
__device__ __forceinline__ void merge_teams(const typename S::Call& a, const WorkTile& work, const float* results,
                                            const float2* stats) {
  each_four<S>(work.rows, a.head_dim, [&](int r, int d) {
    Merged merged;
#pragma unroll
    for (int team = 0; team < S::kTeams; ++team) {
      const int row = team * S::kRows + r;
      merged.add(*reinterpret_cast<const float4*>(results + row * S::kResultPitch + d), stats[row]);
    }
    if (work.num_splits == 1) return write_out(a, work, r, d, merged);
    const Partial<S> partial(a, work, work.split);
    partial.sum(r, d) = merged.out;
    if (d == 0) partial.stats(r) = float2{merged.max, merged.sum};
  });
}

// By one thread, after all rows of the split are written: whether it is the last of its unit.
__device__ __forceinline__ bool count_arrival(int32_t* arrivals, const WorkTile& work) {
  __threadfence();
  const bool last = atomicAdd(arrivals + work.unit, 1) == work.num_splits - 1;
  if (last) arrivals[work.unit] = 0;
  __threadfence();
  return last;
}

// Whether this block is the last of its unit's splits to arrive, and so sees what all others left.
__device__ __forceinline__ bool arrive_last(int32_t* arrivals, const WorkTile& work) {
  __syncthreads();  // all of the block's rows are written before its arrival counts
  return __syncthreads_or(threadIdx.x == 0 && count_arrival(arrivals, work));
}

template <typename S>
__device__ __forceinline__ void merge_splits(const typename S::Call& a, const WorkTile& work) {
  each_four<S>(work.rows, a.head_dim, [&](int r, int d) {
    Merged merged;
#pragma unroll 8
    for (int split = 0; split < work.num_splits; ++split) {
      const Partial<S> partial(a, work, split);
      merged.add(partial.sum(r, d), partial.stats(r));
    }
    write_out(a, work, r, d, merged);
  });
}

template <typename S>
__device__ __forceinline__ void team_barrier() {
  if constexpr (S::kTeamWarps == 1)
    __syncwarp();
  else
    __syncthreads();
}

// Mainloop: streams this block's keys past its rows, then stores the rows in shared memory.
template <typename S>
__device__ __forceinline__ void attend_keys(const typename S::Call& a, const WorkTile& work, uint4* memory,
                                            float* results, float2* stats) {
  KVPipeline<S> pipeline(a, work, reinterpret_cast<typename S::Cached*>(memory));
  const int num_tiles = pipeline.num_tiles();
  pipeline.look_up(0);
#pragma unroll
  for (int stage = 0; stage < S::kStages; ++stage) {
    if (!pipeline.settled(stage)) wait_for_predecessor();
    if (stage < num_tiles) pipeline.start(stage);
    commit_copies();
    pipeline.look_up(stage + 1);
  }
  wait_for_predecessor();
  WarpSoftmax<S> rows(a, work);
  rows.load_queries(reinterpret_cast<typename S::T*>(reinterpret_cast<char*>(memory) + S::kStages * S::kStageBytes));
  if constexpr (S::kRotates)
    for (int stage = 0; stage < S::kStages && stage < num_tiles; ++stage) pipeline.put_new(a, work, stage, stage);
  rows.prepare_queries();
  for (int tile = 0, stage = 0; tile < num_tiles; ++tile, stage = stage + 1 == S::kStages ? 0 : stage + 1) {
    wait_for_copies<S::kStages - 1>();
    team_barrier<S>();
    rows.attend(pipeline.keys(stage), pipeline.values(stage), pipeline.first_key(tile));
    team_barrier<S>();  // the stage may be filled again
    if (tile + S::kStages < num_tiles) {
      pipeline.start(stage);
      if constexpr (S::kRotates) pipeline.put_new(a, work, tile + S::kStages, stage);
    }
    commit_copies();  // an empty group at the end keeps the count of groups
    pipeline.look_up(tile + S::kStages + 1);
  }
  __syncthreads();  // results take the memory of the stages
  rows.store_results(results, stats);
  __syncthreads();
}

template <typename S>
__device__ __forceinline__ void attend(const typename S::Call& a, const WorkTile& work, uint4* memory) {
  float* results = reinterpret_cast<float*>(memory);
  float2* stats = reinterpret_cast<float2*>(results + S::kWarps * S::kWarpRows * S::kResultPitch);
  attend_keys<S>(a, work, memory, results, stats);
  merge_teams<S>(a, work, results, stats);
  if (work.num_splits > 1 && arrive_last(a.arrivals, work)) merge_splits<S>(a, work);
}

// A block for each of the splits that fill the GPU, of each unit. Where there may be more, some blocks that share
// these.
//
// A block that has nothing to do ends at once, so that the kernel behind may begin on its multiprocessor; of each unit
// one waits for the kernel ahead in any case, since the end of a kernel implies that of all before it.
template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    paged_attention_kernel(const __grid_constant__ typename S::Call a) {
  extern __shared__ uint4 memory[];
  start_successor();
  WorkTile work;
  const int index = static_cast<int>(blockIdx.x), units = a.num_tiles * a.num_kv_heads;
  int extra = index - units * a.fill_splits;
  bool found;
  if (S::kMany || extra < 0) {
    found = find_work<S>(a, index % units, index / units, work);
    if (!found && index < units) wait_for_predecessor();
  } else {
    found = find_extra_work<S>(a, extra, work);
  }
  while (found) {
    attend<S>(a, work, memory);
    if (S::kMany || extra < 0) return;
    __syncthreads();  // the stages take the memory of the results
    found = find_extra_work<S>(a, extra += a.num_extra, work);
  }
}

}  // namespace lamina
