// The split-K GEMM in one byte for up to 8 rows of x that it quantizes itself, in 16 bits: while the weights stream in,
// each block finds the scales of x, and lays the columns that it needs in shared memory as TMA would.
#pragma once

#include "quantized_values.cuh"
#include "split_k_gemm.cuh"

namespace lamina {

template <typename In, typename T>
struct QuantizingLinear : Linear<In, T> {
  const T* x;  // [tokens, k], rows x_stride apart
  int64_t x_stride;
  bool paces;  // whether the first weights are loaded at a pace, for the sake of the kernel ahead
};

// Where kShares, blocks that divide the columns of a row each read their own alone, and tell the others what their
// peaks are; else each reads all of x. Not for scales of groups, which every block has whole.
template <typename In, int kWarpgroups, bool kShares>
struct QuantizingShape : SplitKShape<In, kWarpgroups, 8> {
  using Base = SplitKShape<In, kWarpgroups, 8>;
  static constexpr bool kSharesPeaks = kShares;
  static constexpr int kLeastBlocks = kShares ? 4 / kWarpgroups : 1;            // of a multiprocessor, by registers
  static constexpr int kWeightBytes = Base::kTiles * kWarpgroups * kTileBytes;  // of a stage
  static constexpr int kScaleBytes = Base::kTokenRows * 4;             // of a tile of columns, or of whole rows
  static constexpr int kBarrierBytes = 8 * (2 * kMaxStages + 2) + 48;  // a multiple of 64
  static constexpr int kPeerPeakBytes = 8 * kScaleBytes;               // of as many blocks as a cluster has

  // Tiles of columns, a rank.
  __host__ __device__ static constexpr int tiles(int k, int split_k) {
    const int steps = (k + Base::kStep - 1) / Base::kStep;
    return (steps + split_k - 1) / split_k * Base::kTiles;
  }
  __host__ __device__ static constexpr int bytes(int stages, int tiles) {
    const int of_x = tiles * (Base::kXBytes + kScaleBytes) + kScaleBytes + (kShares ? kPeerPeakBytes : 0);
    return stages * kWeightBytes + Base::kSentBytes + of_x + kBarrierBytes + 1024;  // 1024: to align the tiles
  }
};

// Shared memory: stages of weights, sums that peers send, x quantized, its scales [tile][row], the peaks of its rows as
// the bits of floats, which lie as those do where they are not negative, barriers, the peaks that peers send.
struct QuantizingLayout {
  SharedLayout pipeline;
  uint32_t received, x, has_peaks, received_peaks;  // has_peaks: the barrier of what peers send
  float* scales;
  int* peaks;
};

template <typename S, typename In, typename T>
__device__ __forceinline__ QuantizingLayout find_layout(uint32_t begin, const QuantizingLinear<In, T>& p) {
  const int tiles = S::tiles(p.k, p.split_k);
  const uint32_t received = begin + p.stages * S::kWeightBytes, x = received + S::kSentBytes;
  const uint32_t scales = x + tiles * S::kXBytes, peaks = scales + tiles * S::kScaleBytes;
  const uint32_t full = peaks + S::kScaleBytes;
  return {{begin, full, full + 8 * kMaxStages, full + 16 * kMaxStages, p.stages},
          received,
          x,
          full + 8 * (2 * kMaxStages + 1),
          full + S::kBarrierBytes,
          shared_floats(scales),
          reinterpret_cast<int*>(shared_floats(peaks))};
}

// The peaks of rows: each of the block's warps takes parts of them.
template <typename S, typename In, typename T>
__device__ __forceinline__ void find_peaks(const QuantizingLinear<In, T>& p, int token, int rows, int* peaks) {
  constexpr int kWarps = S::kThreads / kWarp;
  const int parts = max(kWarps / rows, 1), vecs = p.k / 8, lane = threadIdx.x % kWarp;
  for (int job = threadIdx.x / kWarp; job < rows * parts; job += kWarps) {
    const T* row = p.x + (token + job / parts) * p.x_stride;
    float peak = 0.0f;
#pragma unroll 8
    for (int vec = job % parts * kWarp + lane; vec < vecs; vec += parts * kWarp)
      peak = max_or_nan(peak, peak_of(load<8>(row + vec * 8)));
    peak = lanes_peak<kWarp>(peak);
    if (lane == 0) atomicMax(peaks + job / parts, __float_as_int(peak));
  }
}

// Sixteen columns of a row of a rank's tiles.
template <typename T>
struct Unit {
  int unit, row, tile;
  Vec<T, 8> halves[2];
};

// The one of a number; all of it is 0 behind the end of x.
template <typename S, typename In, typename T>
__device__ __forceinline__ Unit<T> load_unit(const QuantizingLinear<In, T>& p, const SplitKTile& work, int rows,
                                             int number, bool is_there) {
  Unit<T> found{number % 8, number / 8 % rows, number / 8 / rows, {}};
  const int column = work.begin * S::kStep + found.tile * kGroup + found.unit * 16;
  if (!is_there || column >= p.k) return found;
  const T* from = p.x + (work.token + found.row) * p.x_stride + column;
  found.halves[0] = load<8>(from), found.halves[1] = load<8>(from + 8);
  return found;
}

// Lays it in shared memory in TMA's 128-byte swizzle: unit u of row r lies at u ^ r. Whole groups of 8 neighbouring
// lanes have a tile's row.
template <typename S, typename In, typename T>
__device__ __forceinline__ void lay_unit(const QuantizingLinear<In, T>& p, const QuantizingLayout& at,
                                         const Unit<T>& given, bool is_there) {
  float scale;
  if (p.groups == 0) {
    scale = scale_of<In>(__int_as_float(at.peaks[given.row]));
  } else {
    scale = scale_of<In>(lanes_peak<8>(max_or_nan(peak_of(given.halves[0]), peak_of(given.halves[1]))));
  }
  if (!is_there) return;
  if (given.unit == 0) at.scales[p.groups == 0 ? given.row : given.tile * S::kTokenRows + given.row] = scale;
  const uint32_t place = at.x + given.tile * S::kXBytes + given.row * kRowBytes + (given.unit ^ given.row) * 16;
  auto* const to = reinterpret_cast<uint8_t*>(shared_floats(place));
  store_bytes<In>(to, given.halves[0], scale);
  store_bytes<In>(to + 8, given.halves[1], scale);
}

constexpr int kAtOnce = 4;  // units that a thread loads at once, since nothing else hides how long that takes

// What a thread has of a round of its rank's units: numbers `first`, and as many threads on each.
template <typename S, typename In, typename T>
__device__ __forceinline__ void load_units(Unit<T> (&loaded)[kAtOnce], const QuantizingLinear<In, T>& p,
                                           const SplitKTile& work, int rows, int first, int units) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int number = first + i * S::kThreads;
    loaded[i] = load_unit<S>(p, work, rows, number, number < units);
  }
}

// Calls take(units, the number of the first) for the rounds from one on; all lanes of a warp go through as many.
template <typename S, typename In, typename T, typename Take>
__device__ __forceinline__ void each_round(const QuantizingLinear<In, T>& p, const SplitKTile& work, int rows,
                                           int units, int round, const Take& take) {
  int first = round * kAtOnce * S::kThreads + threadIdx.x;
  for (; first - static_cast<int>(threadIdx.x % kWarp) < units; first += kAtOnce * S::kThreads) {
    Unit<T> loaded[kAtOnce];
    load_units<S>(loaded, p, work, rows, first, units);
    take(loaded, first);
  }
}

// By all of a cluster's consumers: each block's peaks to every block, which then has those of whole rows.
template <typename S>
__device__ __forceinline__ void exchange_peaks(const SplitKTile& work, const QuantizingLayout& at) {
  sync_threads(1, S::kThreads);
  const int thread = static_cast<int>(threadIdx.x), half = thread % 2 * 4;
  if (thread < 2 * work.split_k) {
    const auto* own = reinterpret_cast<const float*>(at.peaks) + half;
    const uint32_t to = at.received_peaks + (work.rank * S::kTokenRows + half) * 4;
    send_to_peer(to, float4{own[0], own[1], own[2], own[3]}, at.has_peaks, thread / 2);
  }
  wait_barrier(at.has_peaks, 0);
  sync_threads(1, S::kThreads);  // the block's own are sent
  if (thread < S::kTokenRows) {
    const auto* from = reinterpret_cast<const int*>(shared_floats(at.received_peaks)) + thread;
    int peak = from[0];
    for (int rank = 1; rank < work.split_k; ++rank) peak = max(peak, from[rank * S::kTokenRows]);
    at.peaks[thread] = peak;
  }
  sync_threads(1, S::kThreads);
}

// All of a rank's columns, laid out by scales of peaks that its cluster shares: what the first round has loaded stays
// in registers until those are known.
template <typename S, typename In, typename T>
__device__ __forceinline__ void lay_out_sharing(const QuantizingLinear<In, T>& p, const SplitKTile& work, int rows,
                                                const QuantizingLayout& at) {
  const int units = (work.end - work.begin) * S::kTiles * rows * 8, own = static_cast<int>(threadIdx.x);
  const auto note_peaks = [&](const Unit<T>(&loaded)[kAtOnce], int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float peak = lanes_peak<8>(max_or_nan(peak_of(loaded[i].halves[0]), peak_of(loaded[i].halves[1])));
      if (first + i * S::kThreads < units && loaded[i].unit == 0)
        atomicMax(at.peaks + loaded[i].row, __float_as_int(peak));
    }
  };
  const auto lay = [&](const Unit<T>(&loaded)[kAtOnce], int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) lay_unit<S>(p, at, loaded[i], first + i * S::kThreads < units);
  };
  Unit<T> held[kAtOnce];
  load_units<S>(held, p, work, rows, own, units);
  note_peaks(held, own);
  each_round<S>(p, work, rows, units, 1, note_peaks);
  exchange_peaks<S>(work, at);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) keep_packed(held[i].halves[0]), keep_packed(held[i].halves[1]);
  lay(held, own);
  each_round<S>(p, work, rows, units, 1, lay);
}

// The same by peaks that are known, or where scales are of groups.
template <typename S, typename In, typename T>
__device__ __forceinline__ void lay_out(const QuantizingLinear<In, T>& p, const SplitKTile& work, int rows,
                                        const QuantizingLayout& at) {
  const int units = (work.end - work.begin) * S::kTiles * rows * 8;
  each_round<S>(p, work, rows, units, 0, [&](const Unit<T>(&loaded)[kAtOnce], int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) lay_unit<S>(p, at, loaded[i], first + i * S::kThreads < units);
  });
}

// By the consumers, whose WGMMAs then read it.
template <typename S, typename In, typename T>
__device__ __forceinline__ void quantize_x(const QuantizingLinear<In, T>& p, const SplitKTile& work,
                                           const QuantizingLayout& at) {
  wait_for_predecessor();
  const int rows = min(p.tokens - work.token, S::kTokenRows);
  if constexpr (S::kSharesPeaks) {
    lay_out_sharing<S>(p, work, rows, at);
  } else {
    if (p.groups == 0) {
      find_peaks<S>(p, work.token, rows, at.peaks);
      sync_threads(1, S::kThreads);
    }
    lay_out<S>(p, work, rows, at);
  }
  fence_shared_for_async();
  sync_threads(1, S::kThreads);
}

// Weights alone, which no kernel of a step writes.
template <typename S, int kWarpgroups>
__device__ __forceinline__ void produce_weights(const CUtensorMap* weight, const SplitKTile& work,
                                                const SharedLayout& at, int n, bool sends, bool paces) {
  if (threadIdx.x % kWarp == 0) {
    const uint64_t once = evict_first();
    const uint32_t begin = clocks();
    int stage = 0, parity = 1;
    for (int step = work.begin; step < work.end; ++step) {
      wait_barrier(at.empty + stage * 8, parity);
      if (paces) pace_loads(step, work, at.empty, at.stages, begin);
      arrive_expecting(at.full + stage * 8, S::kWeightBytes);
#pragma unroll
      for (int i = 0; i < S::kTiles * kWarpgroups; ++i)
        tma_load(at.tiles + stage * S::kWeightBytes + i * kTileBytes, weight,
                 step * S::kStep + i / kWarpgroups * kGroup, first_row<kWarpgroups, false>(work, i % kWarpgroups, n),
                 at.full + stage * 8, once);
      if (++stage == at.stages) stage = 0, parity ^= 1;
    }
  }
  __syncwarp();
  if (sends) wait_for_cluster();
}

template <typename S, int kWarpgroups, typename In, typename T>
__device__ __forceinline__ void quantizing_mainloop(typename S::Sums& sums, const SplitKTile& work,
                                                    const QuantizingLayout& places, const QuantizingLinear<In, T>& p) {
  const SharedLayout& at = places.pipeline;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x % kWarp;
  LaneScales scales(p, first_row<kWarpgroups, false>(work, group, p.n));
  scales.take_shared(places.scales, work.token, S::kTokenRows, work.begin * S::kTiles);
  int stage = 0, parity = 0;
  for (int step = work.begin; step < work.end; ++step) {
    wait_barrier(at.full + stage * 8, parity);
    const uint32_t tiles = at.tiles + stage * S::kWeightBytes + group * kTileBytes;
    Partial<In> parts[S::kTiles][S::kTokenRows / 2];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i)
      begin_tile<S::kTokenRows>(parts[i], tiles + i * kWarpgroups * kTileBytes,
                                places.x + ((step - work.begin) * S::kTiles + i) * S::kXBytes, In{});
    wgmma_wait<0>();
    release_stage(work, at.empty + stage * 8, lane);
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      pin(parts[i]);
      scales.add(sums, parts[i], work.token, step * S::kTiles + i);
    }
    if (++stage == at.stages) stage = 0, parity ^= 1;
  }
  scales.finish(sums, work.token);
}

template <typename S, int kWarpgroups, typename In, typename T>
__global__ void __launch_bounds__(S::kThreads + kWarp, S::kLeastBlocks)
    quantizing_gemm_kernel(const __grid_constant__ CUtensorMap weight, QuantizingLinear<In, T> p) {
  extern __shared__ uint8_t shared[];
  const SplitKTile work = find_work<S::kTokenRows, S::kStep>(p.k, 1, p.split_k);
  const uint32_t begin = shared_address(shared);
  const QuantizingLayout places = find_layout<S>(begin + (-begin & 1023), p);
  const SharedLayout& at = places.pipeline;
  const bool sends = work.split_k > 1, is_consumer = threadIdx.x < S::kThreads;

  start_successor();
  if (threadIdx.x < S::kTokenRows) places.peaks[threadIdx.x] = 0;
  if (threadIdx.x == S::kThreads) {
    prefetch_tensor_map(&weight);
    for (int i = 0; i < p.stages; ++i) {
      init_barrier(at.full + i * 8, 1);
      init_barrier(at.empty + i * 8, S::kThreads / kWarp);
    }
    init_barrier(at.sent, 1);
    init_barrier(places.has_peaks, 1);
    publish_barriers();
    if (sends) arrive_expecting(at.sent, S::kSentBytes);
    if (S::kSharesPeaks) arrive_expecting(places.has_peaks, work.split_k * S::kScaleBytes);
  }
  __syncthreads();
  if (sends) arrive_at_cluster();
  typename S::Sums sums = {};
  if (!is_consumer) {
    produce_weights<S, kWarpgroups>(&weight, work, at, p.n, sends, p.paces);
  } else {
    if (sends && S::kSharesPeaks) wait_for_cluster();  // peers have the barrier that peaks count on
    quantize_x<S>(p, work, places);
    if (sends && !S::kSharesPeaks) wait_for_cluster();
    quantizing_mainloop<S, kWarpgroups>(sums, work, places, p);
  }
  if (sends) {
    if (!is_consumer) return;
    send_sums<S, false>(sums, places.received, at.sent, work);
    wait_barrier(at.sent, 0);
    finish_sent<S, false>(p, shared_floats(places.received), work);
    return;
  }
  __syncthreads();  // every WGMMA has read its tiles, whose memory the sums take
  float* const kept = shared_floats(at.tiles);
  if (is_consumer) keep_sums<S>(kept, sums);
  __syncthreads();
  if (is_consumer) finish_kept<S, false>(p, kept, work);
}

}  // namespace lamina
