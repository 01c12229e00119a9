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
};

template <typename In, int kWarpgroups>
struct QuantizingShape : SplitKShape<In, kWarpgroups, 8> {
  using Base = SplitKShape<In, kWarpgroups, 8>;
  static constexpr int kWeightBytes = Base::kTiles * kWarpgroups * kTileBytes;  // of a stage
  static constexpr int kScaleBytes = Base::kTokenRows * 4;             // of a tile of columns, or of whole rows
  static constexpr int kBarrierBytes = 8 * (2 * kMaxStages + 1) + 56;  // a multiple of 64

  // Tiles of columns, a rank.
  __host__ __device__ static constexpr int tiles(int k, int split_k) {
    const int steps = (k + Base::kStep - 1) / Base::kStep;
    return (steps + split_k - 1) / split_k * Base::kTiles;
  }
  __host__ __device__ static constexpr int bytes(int stages, int tiles) {
    const int of_x = tiles * (Base::kXBytes + kScaleBytes) + kScaleBytes;
    return stages * kWeightBytes + Base::kSentBytes + of_x + kBarrierBytes + 1024;  // 1024: to align the tiles
  }
};

// Shared memory: stages of weights, sums that peers send, x quantized, its scales [tile][row], the peaks of its rows as
// the bits of floats, which lie as those do where they are not negative, barriers.
struct QuantizingLayout {
  SharedLayout pipeline;
  uint32_t received, x;
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

// All of a rank's columns, of which a thread loads some units at once, since nothing else hides how long that takes.
template <typename S, typename In, typename T>
__device__ __forceinline__ void lay_out(const QuantizingLinear<In, T>& p, const SplitKTile& work, int rows,
                                        const QuantizingLayout& at) {
  constexpr int kAtOnce = 4;
  const int units = (work.end - work.begin) * S::kTiles * rows * 8;
  for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x % kWarp) < units; first += kAtOnce * S::kThreads) {
    Unit<T> loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      loaded[i] = load_unit<S>(p, work, rows, first + i * S::kThreads, first + i * S::kThreads < units);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) lay_unit<S>(p, at, loaded[i], first + i * S::kThreads < units);
  }
}

// By the consumers, whose WGMMAs then read it.
template <typename S, typename In, typename T>
__device__ __forceinline__ void quantize_x(const QuantizingLinear<In, T>& p, const SplitKTile& work,
                                           const QuantizingLayout& at) {
  wait_for_predecessor();
  const int rows = min(p.tokens - work.token, S::kTokenRows);
  if (p.groups == 0) {
    find_peaks<S>(p, work.token, rows, at.peaks);
    sync_threads(1, S::kThreads);
  }
  lay_out<S>(p, work, rows, at);
  fence_shared_for_async();
  sync_threads(1, S::kThreads);
}

// Weights alone, which no kernel of a step writes.
template <typename S, int kWarpgroups>
__device__ __forceinline__ void produce_weights(const CUtensorMap* weight, const SplitKTile& work,
                                                const SharedLayout& at, int n, bool sends) {
  if (threadIdx.x % kWarp == 0) {
    const uint64_t once = evict_first();
    int stage = 0, parity = 1;
    for (int step = work.begin; step < work.end; ++step) {
      wait_barrier(at.empty + stage * 8, parity);
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

template <typename In, typename T, int kWarpgroups>
__global__ void __launch_bounds__(kWarpgroups * 128 + kWarp)
    quantizing_gemm_kernel(const __grid_constant__ CUtensorMap weight, QuantizingLinear<In, T> p) {
  using S = QuantizingShape<In, kWarpgroups>;
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
    publish_barriers();
    if (sends) arrive_expecting(at.sent, S::kSentBytes);
  }
  __syncthreads();
  if (sends) arrive_at_cluster();
  typename S::Sums sums = {};
  if (!is_consumer) {
    produce_weights<S, kWarpgroups>(&weight, work, at, p.n, sends);
  } else {
    quantize_x<S>(p, work, places);
    if (sends) wait_for_cluster();
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
