// out = (silu_and_mul of) x @ w.T + bias by blocks of weights as a GGUF file has them, on raw pointers.
//
// x is quantized first; whole numbers are multiplied, and what each 32 columns sum up to goes by both scales into a sum
// of floats. A lane is a row of weights, so nothing is summed across lanes, and each element of out is one chain over
// its columns in order: its bits depend on no other row of x or of the weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "buffer.h"
#include "formats.h"
#include "quantized_rows.h"
#include "rounding.h"
#include "thread_pool.h"

namespace lamina {

constexpr int kTile = 8;                      // rows of x that meet weights unpacked once
constexpr int64_t kQuantizedBytes = 1 << 20;  // of x that weights go by at once: they stay in a core's own cache
constexpr int64_t kMinChunkTokens = 64;
constexpr int64_t kMinParallelBlocks = 1 << 17;  // multiply-adds below which waking threads costs more than it saves
constexpr int64_t kMinChunk = 1 << 16;           // of those that a thread claims at once
constexpr int64_t kQuantizedAlone = 1 << 14;     // columns of x in all

// Rows of one kind.
struct BlockRun {
  int64_t kind, rows;
};

template <typename T>
struct LinearBlocks {
  const T* x;
  int64_t x_token;  // stride; a row is contiguous
  int64_t tokens;
  const uint8_t* weight;  // of each run groups of sixteen rows, interleaved; then those left, each as it lies
  const T* bias;          // or null
  T* out;                 // contiguous
  const BlockRun* runs;   // one below the other
  int64_t num_runs, columns;
  bool gated;  // rows of a gate, then as many of what it gates, each run in whole groups
  int threads;

  void run() const {
    thread_local Buffer buffer;
    const int64_t spans = columns / kSpan, most = kQuantizedBytes / static_cast<int64_t>(sizeof(QuantizedSpan));
    const int64_t chunk = std::max(kMinChunkTokens, most / std::max<int64_t>(1, spans) / kTile * kTile);
    const size_t needed = spans * std::min(tokens, chunk) * sizeof(QuantizedSpan);
    auto* quantized = reinterpret_cast<QuantizedSpan*>(buffer.reserve(needed / sizeof(float) + 1));
    for (int64_t first = 0; first < tokens; first += chunk) {
      const int64_t count = std::min(chunk, tokens - first);
      quantize(first, count, quantized);
      multiply(first, count, quantized);
    }
  }

 private:
  int64_t spans() const { return columns / kSpan; }
  int64_t out_rows() const {
    int64_t rows = 0;
    for (int64_t r = 0; r < num_runs; r++) rows += runs[r].rows;
    return gated ? rows / 2 : rows;
  }

  int64_t num_groups() const {
    int64_t groups = 0;
    for (int64_t r = 0; r < num_runs; r++) groups += groups_of(runs[r]);
    return gated ? groups / 2 : groups;
  }

  static int64_t groups_of(const BlockRun& run) { return (run.rows + kGroupRows - 1) / kGroupRows; }

  // A span's rows of x are neighbours.
  void quantize(int64_t first, int64_t count, QuantizedSpan* to) const {
    const auto quantize_row = [&](int64_t t) {
      const T* from = x + (first + t) * x_token;
      for (int64_t s = 0; s < spans(); s++) quantize_span(from + s * kSpan, kSpan, to + s * count + t);
    };
    parallel_chunks(count, count * columns > kQuantizedAlone ? threads : 1, quantize_row);
  }

  void multiply(int64_t first, int64_t count, const QuantizedSpan* from) const {
    const int64_t groups = num_groups(), width = out_rows();
    const int64_t work = count * columns * kGroupRows,
                  grain = std::max<int64_t>(1, kMinChunk / std::max<int64_t>(1, work));
    const int at_once = work * groups > kMinParallelBlocks ? threads : 1;
    parallel_ranges(groups, grain, at_once, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; index++) {
        const Group own = find_group(index, 0), other = gated ? find_group(groups + index, 1) : own;
        multiply_group(own, other, width, first, count, from);
      }
    });
  }

  // Sixteen rows, interleaved; of the last of a run `count`.
  struct Group {
    const uint8_t* data;
    int64_t kind, row, count;
  };

  void multiply_group(const Group& own, const Group& other, int64_t width, int64_t first, int64_t count,
                      const QuantizedSpan* from) const {
    for (int64_t t = 0; t < count; t += kTile) {
      const int some = static_cast<int>(std::min<int64_t>(kTile, count - t));
      for (int lane = 0; lane < own.count; lane += kLanes) {
        Vec sums[2][kTile];
        multiply_lanes(own, lane, from + t, count, some, sums[0]);
        if (gated) multiply_lanes(other, lane, from + t, count, some, sums[1]);
        for (int i = 0; i < some; i++)
          write(first + t + i, width, own.row + lane, own.count - lane, sums[0][i], sums[1][i]);
      }
    }
  }

  Group find_group(int64_t index, int which) const {
    const BlockRun* run = runs;
    const uint8_t* data = weight;
    int64_t row = 0;
    for (; index >= groups_of(*run); run++) {
      index -= groups_of(*run), row += run->rows;
      data += run->rows * row_bytes(run->kind);
    }
    const int64_t before = index * kGroupRows, count = std::min<int64_t>(kGroupRows, run->rows - before);
    data += before * row_bytes(run->kind);
    if (count < kGroupRows) data = interleaved(data, run->kind, static_cast<int>(count), which);
    return {data, run->kind, row + before, count};
  }

  int64_t row_bytes(int64_t kind) const {
    return with_format(kind, [&](auto tag) {
      using Format = typename decltype(tag)::Type;
      return columns / Format::kColumns * Format::kBytes;
    });
  }

  // The last rows of a run, fewer than sixteen, which lie as they are.
  const uint8_t* interleaved(const uint8_t* rows, int64_t kind, int count, int which) const {
    thread_local Buffer buffers[2];
    auto* own = reinterpret_cast<uint8_t*>(buffers[which].reserve(row_bytes(kind) * kGroupRows / sizeof(float) + 1));
    with_format(kind, [&](auto tag) {
      using Format = typename decltype(tag)::Type;
      interleave<Format>(rows, count, columns / Format::kColumns, own);
    });
    return own;
  }

  void multiply_lanes(const Group& group, int lane, const QuantizedSpan* x, int64_t stride, int count,
                      Vec* sums) const {
    with_format(group.kind, [&](auto tag) {
      multiply_some<typename decltype(tag)::Type, kTile>(group.data, lane, x, stride, count, sums);
    });
  }

  template <typename Format, int some>
  void multiply_some(const uint8_t* group, int lane, const QuantizedSpan* x, int64_t stride, int count,
                     Vec* sums) const {
    if (count == some) return multiply_rows<Format, some>(group, lane, x, stride, sums);
    if constexpr (some > 1) multiply_some<Format, some - 1>(group, lane, x, stride, count, sums);
  }

  template <typename Format, int count>
  void multiply_rows(const uint8_t* group, int lane, const QuantizedSpan* x, int64_t stride, Vec* sums) const {
    constexpr int kSpans = Format::kColumns / kSpan, kHalf = kChunks / Format::kScales;
    Vec sum[count] = {};
    const uint8_t* end = group + columns / Format::kColumns * Format::kBytes * kGroupRows;
    for (; group < end; group += Format::kBytes * kGroupRows) {
      const Format block(group, lane);
      for (int s = 0; s < kSpans; s++, x += stride) {
        ByteVec numbers[kChunks];
        block.unpack(s, numbers);
        const Vec minimum = block.minimum(s);
        Vec scales[Format::kScales];
        for (int h = 0; h < Format::kScales; h++) scales[h] = block.scale(s, h);
        for (int t = 0; t < count; t++) {
          for (int h = 0; h < Format::kScales; h++) {
            const int total = Format::kScales == 1 ? x[t].totals[0] + x[t].totals[1] : x[t].totals[h];
            IntVec dots = -Format::kOffset * total - IntVec{};
            for (int c = h * kHalf; c < (h + 1) * kHalf; c++)
              dots = add_dots<Format::kIsWide>(dots, numbers[c], broadcast_four(x[t].values + 4 * c));
            sum[t] += __builtin_convertvector(dots, Vec) * (scales[h] * x[t].scale);
          }
          if (Format::kHasMinimum) sum[t] += minimum * x[t].scaled_total;
        }
      }
    }
    for (int t = 0; t < count; t++) sums[t] = sum[t];
  }

  void write(int64_t token, int64_t width, int64_t row, int64_t count, Vec first, Vec second) const {
    first = finished(first, row, count);
    if (gated) {
      const Vec gate = rounded<T>(first), up = rounded<T>(finished(second, width + row, count));
      first = rounded<T>(gate / (1.0f + exp(-gate))) * up;
    }
    store_some(out + token * width + row, first, count);
  }

  Vec finished(Vec sums, int64_t row, int64_t count) const {
    return bias == nullptr ? sums : sums + load_some(bias + row, count);
  }
};

}  // namespace lamina
