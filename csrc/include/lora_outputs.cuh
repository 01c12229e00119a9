// Low-rank adapters on GPUs with clusters: what a cluster expands, and hands on to whoever finishes it.
//
// A Finish has kParts, the parts whose same outputs a cluster has; kMeets, whether the blocks of a cluster send each
// other something for each 4 tokens; and these, called by all threads:
//   init()                         barriers of its own, by one thread
//   expect(count)                  the same thread, before a round of so many tokens
//   load(outputs, tile)            what else is read of tokens, behind the kernel ahead
//   write(outputs, tile, half)     the first or the last 4 tokens of a round
#pragma once

#include "lora_cluster.cuh"

namespace lamina {

// What a thread reads and writes of up to 4 tokens: its own outputs of each part.
template <typename T, int kRows, int kParts>
struct Outputs {
  T values[kParts][kRows][kHalfRound];
  int tokens[kHalfRound], count;

  // From this token of the group on.
  __device__ __forceinline__ void find(const TokenGroup& group, int first) {
    count = min(kHalfRound, group.count - first);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) tokens[t] = __shfl_sync(kAllLanes, group.token, (first + t) % 32);
  }

  // Calls take(r, t, row) for each that there is.
  template <typename Take>
  __device__ __forceinline__ void for_each(const LoraTile& tile, const Take& take) const {
    const int first = tile.first + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (t < count && first + r * kLoraThreads < tile.last) take(r, t, first + r * kLoraThreads);
  }

  __device__ __forceinline__ void load_given(const Lora<T>& p, const LoraTile& tile) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int t = 0; t < kHalfRound; ++t) values[part][r][t] = T{};
    for_each(tile, [&](int r, int t, int row) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        values[part][r][t] = p.y[static_cast<int64_t>(tokens[t]) * p.y_token + part * p.rows[0] + row];
    });
  }
};

template <typename T, int kRows, int kParts, typename Finish>
__device__ __forceinline__ void load_outputs(const Lora<T>& p, const LoraTile& tile, const TokenGroup& group, int first,
                                             Finish& finish, Outputs<T, kRows, kParts>& outputs) {
  outputs.find(group, first);
  outputs.load_given(p, tile);
  finish.load(outputs, tile);
}

template <int kRows, typename T>
__device__ __forceinline__ void add_vec(float (&sums)[kRows][kHalfRound], const Vec<T, 8> (&rows)[kRows],
                                        uint32_t totals, int token_bytes, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float weights[kRows][8];
#pragma unroll
    for (int r = 0; r < kRows; ++r) to_floats(weights[r], rows[r]);
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) {
      if (t >= count) break;
      const float4 four = load_four(totals + static_cast<uint32_t>(t * token_bytes + half * 16));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r][t] = fmaf(weights[r][half * 4], four.x, sums[r][t]);
        sums[r][t] = fmaf(weights[r][half * 4 + 1], four.y, sums[r][t]);
        sums[r][t] = fmaf(weights[r][half * 4 + 2], four.z, sums[r][t]);
        sums[r][t] = fmaf(weights[r][half * 4 + 3], four.w, sums[r][t]);
      }
    }
  }
}

// Adds what an adapter comes to in a part for up to 4 tokens, whose totals of that part begin here.
template <typename T, int kChunks, int kRows, int kParts>
__device__ __forceinline__ void expand_part(const Lora<T>& p, const LoraTile& tile,
                                            const HeldAdapter<T, kChunks, kRows, kParts>& held, int part, float scale,
                                            uint32_t totals, Outputs<T, kRows, kParts>& outputs) {
  const int token_bytes = rank_tiles<kParts>(p) * kTileRank * 4, vecs = p.rank / 8;
  float sums[kRows][kHalfRound] = {};
  Vec<T, 8> rows[kRows];
#pragma unroll
  for (int i = 0; i < kHeldVecs; ++i) {
    if (i >= vecs) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = held.rows[part][r][i];
      keep_packed(rows[r]);
    }
    add_vec<kRows>(sums, rows, totals + static_cast<uint32_t>(i * 32), token_bytes, outputs.count);
  }
#pragma unroll 1
  for (int i = kHeldVecs; i < vecs; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = held.load_of_b(p, tile, part, r, i);
    add_vec<kRows>(sums, rows, totals + static_cast<uint32_t>(i * 32), token_bytes, outputs.count);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int t = 0; t < kHalfRound; ++t) {
      T& value = outputs.values[part][r][t];
      value = static_cast<T>(fmaf(scale, sums[r][t], static_cast<float>(value)));
    }
}

// Of the parts that a cluster has; 0 where a slot changes nothing.
template <int kParts>
struct PartScales {
  float of[kParts];

  template <typename T>
  __device__ __forceinline__ PartScales(const Lora<T>& p, int slot, int part) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) of[i] = slot < 0 ? 0.0f : p.scales[slot * p.num_parts + part + i];
  }
  __device__ __forceinline__ bool are_zero() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kParts; ++i) all = all && of[i] == 0.0f;
    return all;
  }
};

template <typename T, int kChunks, int kRows, int kParts>
__device__ __forceinline__ void expand_tokens(const Lora<T>& p, const LoraTile& tile,
                                              const HeldAdapter<T, kChunks, kRows, kParts>& held,
                                              const PartScales<kParts>& scales, uint32_t totals,
                                              Outputs<T, kRows, kParts>& outputs) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (kParts == 1 || scales.of[part] != 0.0f)
      expand_part(p, tile, held, part, scales.of[part], totals + static_cast<uint32_t>(part * p.rank * 4), outputs);
}

// Up to 8 tokens of a group, from this one on. All blocks of a cluster call it together.
template <typename T, int kChunks, int kRows, int kParts, typename Finish>
__device__ __forceinline__ void add_round(const Lora<T>& p, const LoraTile& tile, const TokenGroup& group, int first,
                                          HeldAdapter<T, kChunks, kRows, kParts>& held,
                                          const PartScales<kParts>& scales, int block, const ClusterMemory& at,
                                          uint32_t parity, Finish& finish) {
  const int tiles = rank_tiles<kParts>(p), own = first + lane_index() / 4;
  if (threadIdx.x == 0) {
    arrive_expecting(at.sent, static_cast<uint32_t>(tiles * kSegments * kTileSums * 4));
    finish.expect(group.count - first);
  }
  arrive_at_cluster();  // nothing of a round before is read any more
  const int token = __shfl_sync(kAllLanes, group.token, own % 32);
  shrink_round(p, held, p.x + static_cast<int64_t>(token) * p.x_token, own < group.count, block, at.partials);
  __syncthreads();
  wait_for_cluster();
  send_sums(at, tiles, block);
  Outputs<T, kRows, kParts> outputs;
  load_outputs(p, tile, group, first, finish, outputs);  // meanwhile
  if constexpr (!HeldAdapter<T, kChunks, kRows, kParts>::kHasRoom) held.hold_rows(p, tile);
  wait_barrier(at.sent, parity);
  add_received(at, tiles);
  __syncthreads();
  expand_tokens(p, tile, held, scales, at.totals, outputs);
  finish.write(outputs, tile, 0);
  if (first + kHalfRound >= group.count) return;
  load_outputs(p, tile, group, first + kHalfRound, finish, outputs);
  const auto behind = static_cast<uint32_t>(kHalfRound * tiles * kTileRank * 4);
  expand_tokens(p, tile, held, scales, at.totals + behind, outputs);
  finish.write(outputs, tile, 1);
}

// The same of tokens to which nothing is added.
template <int kRows, typename T, typename Finish>
__device__ __forceinline__ void copy_round(const Lora<T>& p, const LoraTile& tile, const TokenGroup& group, int first,
                                           Finish& finish) {
  if constexpr (Finish::kMeets) {
    if (threadIdx.x == 0) finish.expect(group.count - first);
    arrive_at_cluster();
    wait_for_cluster();
  }
#pragma unroll 1
  for (int half = 0; half < 2 && first + half * kHalfRound < group.count; ++half) {
    Outputs<T, kRows, Finish::kParts> outputs;
    load_outputs(p, tile, group, first + half * kHalfRound, finish, outputs);
    finish.write(outputs, tile, half);
  }
}

// A whole kernel but for its beginning. Slots, scales, A and B are read before the kernel ahead has ended: no kernel of
// a CUDA graph that has this one may write them.
template <int kChunks, int kRows, typename T, typename Finish>
__device__ __forceinline__ void add_adapters(const Lora<T>& p, const ClusterMemory& at, Finish& finish) {
  constexpr int kParts = Finish::kParts;
  const auto place = static_cast<int>(blockIdx.x) / kSegments, block = static_cast<int>(blockIdx.x) % kSegments;
  const LoraTile tile = tile_of<kSegments>(p, place % p.num_tiles, block);
  const TokenWindow window = window_of(p, place / p.num_tiles / p.num_groups * kWindow);
  const int groups = __popc(window.leaders), first = place / p.num_tiles % p.num_groups;
  if (first >= groups) return;
  if (threadIdx.x == 0) {
    init_barrier(at.sent, 1);
    finish.init();
    publish_barriers();
  }
  uint32_t parity = 0;
  for (int index = first; index < groups; index += p.num_groups) {
    const TokenGroup group = group_of(window, index);
    const PartScales<kParts> scales(p, group.slot, tile.part);
    HeldAdapter<T, kChunks, kRows, kParts> held;
    if (group.slot >= 0) held.begin(p, tile, group.slot, block);
    if (index == first) wait_for_predecessor();
    const bool is_copy = scales.are_zero();
    for (int token = 0; token < group.count; token += kRound) {
      if (is_copy) {
        copy_round<kRows>(p, tile, group, token, finish);
      } else {
        add_round(p, tile, group, token, held, scales, block, at, parity, finish);
        parity ^= 1;
      }
    }
  }
}

// Slots of a window whose tokens are computed at once.
template <typename T>
int groups_at_once(const Lora<T>& p, int num_slots) {
  return p.tokens > kManyTokens ? 1 : min(min(p.tokens, kWindow), num_slots + 1);
}

// How a kernel divides the work, so that no more than a wave of blocks have some: rows of B that a thread has of a
// part, and clusters for the slots of a window.
template <typename T>
int divide_by_clusters(Lora<T>& p, int num_slots, int most_rows, int wave = kWave) {
  const int windows = (p.tokens + kWindow - 1) / kWindow;
  p.num_groups = groups_at_once(p, num_slots);
  int rows = 1;
  p.set_block_rows(kLoraThreads);
  while (rows < most_rows && windows * min(p.num_groups, num_slots) * p.num_tiles * kSegments > wave) {
    const int before = p.num_tiles;
    p.set_block_rows(2 * rows * kLoraThreads);
    if (p.num_tiles == before) break;
    rows *= 2;
  }
  p.set_block_rows(rows * kLoraThreads);
  return rows;
}

template <typename T>
int num_clusters(const Lora<T>& p) {
  return (p.tokens + kWindow - 1) / kWindow * p.num_groups * p.num_tiles;
}

}  // namespace lamina
