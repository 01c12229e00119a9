// GEMM on a CPU by weights that are read once and where they lie: sum over k of x[token][k] * weight[row][k].
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "buffer.h"
#include "int8.h"
#include "lane_ops.h"
#include "thread_pool.h"

namespace lamina {

constexpr int kBlockTokens = 64;               // of which a unit's sums are kept before they are written
constexpr int64_t kMinParallelWork = 1 << 17;  // multiply-adds below which waking threads costs more than it saves
// Short rows are fetched ahead of their use a whole unit further down, long ones so much further on in themselves:
// units are few where rows are long, and a thread's first one would come late, and what follows its last one for
// nothing.
constexpr int64_t kLongRow = 8192, kBytesAhead = 1024;  // bytes

// kLanes rows of weights, or fewer at the end of a matrix.
template <typename W>
struct Strip {
  const W* data;
  int64_t stride;  // in elements
  int count;
};

// Two strips that are worked on together, with the rows of the result they stand for.
template <typename W>
struct Unit {
  Strip<W> strips[2];
  int64_t rows_ahead;  // from a strip to the one the same thread takes next
};

// Columns of type W between what is read and what is fetched meanwhile; all of a row where that is short.
template <typename W>
constexpr int64_t columns_ahead(int64_t depth) {
  return depth * static_cast<int64_t>(sizeof(W)) > kLongRow ? kBytesAhead / static_cast<int64_t>(sizeof(W)) : depth;
}

// Dot products along the rows of the weights, by vector instructions. x is packed as rows of whole steps, zeros behind
// their end.
template <typename T, typename W>
class DotKernel {
 public:
  using Element = T;
  using Packed = typename LaneOps<T, W>::Packed;
  static constexpr int kStep = LaneOps<T, W>::kStep;

  explicit DotKernel(int64_t depth)
      : depth_(depth), row_((depth + kStep - 1) / kStep * kStep), ahead_(columns_ahead<W>(depth)) {}

  static constexpr int kPackTokens = 1;
  struct Scope {};

  size_t packed_elements(int64_t tokens) const { return tokens * row_; }

  // A row of x, contiguous, as token `token`.
  void pack(const T* const* rows, int64_t token, int, Packed* x) const {
    for (int64_t k = 0; k < depth_; k += kStep) LaneOps<T, W>::pack(rows[0] + k, depth_ - k, x + token * row_ + k);
  }

  // sums[s][t], lane r: row r of strip s times token first + t.
  void multiply(const Unit<W>& unit, const Packed* x, int64_t first, int tokens, int64_t,
                Vec (*sums)[kBlockTokens]) const {
    const int64_t ahead = first == 0 ? unit.rows_ahead : 0;
    for (int s = 0; s < 2; s++) strip(unit.strips[s], x + first * row_, tokens, ahead, sums[s]);
  }

 private:
  void strip(const Strip<W>& weights, const Packed* x, int tokens, int64_t ahead, Vec* sums) const {
    constexpr int kWide = kRegisters == 32 ? 4 : 2;
    int t = 0;
    for (; tokens - t >= 4; t += 4, ahead = 0) columns<kWide, 4>(weights, x + t * row_, ahead, sums + t);
    for (; tokens - t >= 2; t += 2, ahead = 0) columns<2 * kWide, 2>(weights, x + t * row_, ahead, sums + t);
    for (; tokens - t >= 1; t += 1, ahead = 0) columns<4 * kWide, 1>(weights, x + t * row_, ahead, sums + t);
  }

  // `rows` weights by `tokens` rows of x at a time; the terms of each dot product are summed in one order whatever
  // those are.
  template <int rows, int tokens>
  void columns(const Strip<W>& weights, const Packed* x, int64_t ahead, Vec* sums) const {
    Vec parts[tokens][kLanes];
    for (int r = 0; r < kLanes; r += rows) {
      const W* from[rows];
      for (int i = 0; i < rows; i++) from[i] = weights.data + std::min(r + i, weights.count - 1) * weights.stride;
      block<rows, tokens>(from, x, ahead * weights.stride, &parts[0][r]);
    }
    for (int t = 0; t < tokens; t++) sums[t] = sum_rows(parts[t]);
  }

  template <int rows, int tokens>
  void block(const W* const* weights, const Packed* x, int64_t below, Vec* parts) const {
    Vec sum[rows][tokens] = {};
    int64_t k = 0;
    for (; k + kStep <= depth_; k += kStep) {
      if (below != 0) {
        const int64_t at = k + ahead_ + (k + ahead_ < depth_ ? 0 : below - depth_);
        for (int r = 0; r < rows; r++) __builtin_prefetch(weights[r] + at, 0, 2);
      }
      for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++)
          sum[r][t] = LaneOps<T, W>::multiply_add(sum[r][t], weights[r] + k, x + t * row_ + k);
    }
    if (k < depth_) {
      for (int r = 0; r < rows; r++) {
        W end[kStep] = {};
        std::memcpy(end, weights[r] + k, (depth_ - k) * sizeof(W));
        for (int t = 0; t < tokens; t++) sum[r][t] = LaneOps<T, W>::multiply_add(sum[r][t], end, x + t * row_ + k);
      }
    }
    for (int r = 0; r < rows; r++)
      for (int t = 0; t < tokens; t++) parts[t * kLanes + r] = sum[r][t];
  }

  int64_t depth_, row_, ahead_;
};

#if defined(LAMINA_AMX)
class AmxKernel {
 public:
  using Element = BFloat16;
  using Packed = BFloat16;
  static_assert(kLanes == kTileRows, "a strip is a tile");

  explicit AmxKernel(int64_t depth) : depth_(depth), group_((depth + kTileDepth - 1) / kTileDepth * kTileElements) {}

  static constexpr int kPackTokens = kTileRows;
  using Scope = AmxScope;

  size_t packed_elements(int64_t tokens) const { return (tokens + kTileRows - 1) / kTileRows * group_; }

  void pack(const BFloat16* const* rows, int64_t token, int count, BFloat16* x) const {
    x += token / kTileRows * group_;
    for (int64_t k = 0; k < depth_; k += kTileDepth, x += kTileElements) pack_tile(rows, count, k, depth_ - k, x);
  }

  void multiply(const Unit<BFloat16>& unit, const BFloat16* x, int64_t first, int tokens, int64_t all,
                Vec (*sums)[kBlockTokens]) const {
    const TileRows strips[2] = {{unit.strips[0].data, unit.strips[0].stride, unit.strips[0].count},
                                {unit.strips[1].data, unit.strips[1].stride, unit.strips[1].count}};
    x += first / kTileRows * group_;
    const int blocks = static_cast<int>((all + 2 * kTileRows - 1) / (2 * kTileRows));
    for (int t = 0; t < tokens; t += 2 * kTileRows, x += 2 * group_) {
      const int64_t columns = blocks == 1 ? columns_ahead<BFloat16>(depth_) : depth_;
      const Prefetch ahead{unit.rows_ahead, columns, blocks, static_cast<int>((first + t) / (2 * kTileRows))};
      clear_sums();
      if (tokens - t <= kTileRows) {
        add_tiles<1>(strips, x, group_, depth_, ahead);
        store_sums<1>(sums[0] + t, sums[1] + t);
      } else {
        add_tiles<2>(strips, x, group_, depth_, ahead);
        store_sums<2>(sums[0] + t, sums[1] + t);
      }
    }
  }

 private:
  int64_t depth_, group_;
};
#endif

#if defined(LAMINA_AMX) && defined(LAMINA_INT8_AS_BF16)
class AmxInt8Kernel {
 public:
  using Element = BFloat16;
  using Packed = BFloat16;

  explicit AmxInt8Kernel(int64_t depth) : depth_(depth), padded_((depth + kBytes - 1) / kBytes * kBytes) {}

  static constexpr int kPackTokens = kTileRows;
  using Scope = AmxScope;

  size_t packed_elements(int64_t tokens) const { return (tokens + kTileRows - 1) / kTileRows * group(); }

  void pack(const BFloat16* const* rows, int64_t token, int count, BFloat16* x) const {
    x += token / kTileRows * group();
    for (int64_t k = 0; k < depth_; k += kBytes, x += 2 * kTileElements) {
      Vec halves[2][kTileRows] = {};
      for (int t = 0; t < count; t++) load_widened(rows[t] + k, depth_ - k, halves[0][t], halves[1][t]);
      transpose(halves[0]);
      transpose(halves[1]);
      std::memcpy(x, halves, sizeof(halves));
    }
  }

  // Of many tokens a unit's weights are all widened with the first.
  void multiply(const Unit<int8_t>& unit, const BFloat16* x, int64_t first, int tokens, int64_t all,
                Vec (*sums)[kBlockTokens]) const {
    if (all <= 2 * kTileRows) return multiply_few(unit, x, tokens, sums);
    Wide wide(padded_, 1);
    x += first / kTileRows * group();
    for (int t = 0; t < tokens; t += 2 * kTileRows, x += 2 * group()) {
      clear_sums();
      if (first + t == 0) widen_unit(unit, 0, padded_, wide, 0);
      add(tokens - t, wide.strips(0), x, padded_);
      tokens - t <= kTileRows ? store_sums<1>(sums[0] + t, sums[1] + t) : store_sums<2>(sums[0] + t, sums[1] + t);
    }
  }

 private:
  static constexpr int64_t kFewColumns = 128;

  // A thread's memory for widened columns of a unit, once or twice.
  struct Wide {
    BFloat16* data;
    int64_t stride;

    Wide(int64_t columns, int copies) : stride(columns + kTileDepth) {  // no power of two: few fit the first cache
      thread_local Buffer buffer;
      data = reinterpret_cast<BFloat16*>(buffer.reserve(copies * kTileRows * stride));
    }
    BFloat16* copy(int which) const { return data + which * 2 * kTileRows * stride; }
    std::array<TileRows, 2> strips(int which) const {
      return {{{copy(which), stride, kTileRows}, {copy(which) + kTileRows * stride, stride, kTileRows}}};
    }
  };

  // Few columns at a time, the next ones while AMX multiplies: it waits for what was just stored.
  void multiply_few(const Unit<int8_t>& unit, const BFloat16* x, int tokens, Vec (*sums)[kBlockTokens]) const {
    const Wide wide(kFewColumns, 2);
    int now = 0;
    clear_sums();
    widen_unit(unit, 0, std::min(kFewColumns, padded_), wide, now);
    for (int64_t from = 0; from < padded_; from += kFewColumns, now ^= 1) {
      const int64_t next = from + kFewColumns;
      if (next < padded_) widen_unit(unit, next, std::min(kFewColumns, padded_ - next), wide, now ^ 1);
      add(tokens, wide.strips(now), x + from * kTileRows, std::min(kFewColumns, padded_ - from));
    }
    tokens <= kTileRows ? store_sums<1>(sums[0], sums[1]) : store_sums<2>(sums[0], sums[1]);
  }

  int64_t group() const { return padded_ * kTileRows; }

  void add(int tokens, const std::array<TileRows, 2>& strips, const BFloat16* x, int64_t count) const {
    const Prefetch nothing{0, 0, 1 << 30, 1 << 30};
    tokens <= kTileRows ? add_tiles<1>(strips.data(), x, group(), count, nothing)
                        : add_tiles<2>(strips.data(), x, group(), count, nothing);
  }

  void widen_unit(const Unit<int8_t>& unit, int64_t from, int64_t count, const Wide& wide, int which) const {
    BFloat16* to = wide.copy(which);
    for (const Strip<int8_t>& strip : unit.strips)
      for (int r = 0; r < kTileRows; r++, to += wide.stride) {
        const int8_t* row = strip.data + std::min(r, strip.count - 1) * strip.stride;
        for (int64_t k = from; k < from + count; k += kBytes) {
          __builtin_prefetch(row + unit.rows_ahead * strip.stride + k, 0, 2);
          __m512i halves[2];
          widen(load_bytes(row + k, depth_ - k), halves[0], halves[1]);
          std::memcpy(to + k - from, halves, sizeof(halves));
        }
      }
  }

  int64_t depth_, padded_;
};
#endif

// Weights [rows, depth], each row contiguous.
template <typename W>
struct Matrix {
  const W* data;
  int64_t rows, depth, stride;

  Strip<W> strip(int64_t row, int64_t end) const {
    int64_t count = std::min<int64_t>(kLanes, end - row);
    return count > 0 ? Strip<W>{data + row * stride, stride, static_cast<int>(count)} : Strip<W>{data, stride, 1};
  }
};

// The units of a GEMM: neighbouring strips, or with `gated` one of each half of the rows.
template <typename W>
class Units {
 public:
  Units(const Matrix<W>& weight, bool gated)
      : weight_(weight), gated_(gated), half_(gated ? weight.rows / 2 : 0), step_(gated ? kLanes : 2 * kLanes) {}

  int64_t count() const { return ((gated_ ? half_ : weight_.rows) + step_ - 1) / step_; }
  int64_t row(int64_t unit) const { return unit * step_; }
  Unit<W> operator[](int64_t unit) const {
    int64_t first = row(unit), second = gated_ ? half_ + first : first + kLanes;
    return {{weight_.strip(first, gated_ ? half_ : weight_.rows), weight_.strip(second, weight_.rows)}, step_};
  }

 private:
  Matrix<W> weight_;
  bool gated_;
  int64_t half_, step_;
};

constexpr int64_t kChunkTokens = 512;  // packed at once: they stay in a core's own cache while the weights go by
constexpr int64_t kPackedAlone = 16;   // tokens that a thread packs before another one would have begun

// Calls write(token, row, sums of the first strip, sums of the second) for every token and unit. rows(first, count,
// pointers) leaves pointers to `count` contiguous rows of x, at most 16, that live until the thread's next call, as
// does a unit of `units`. `work`: multiply-adds a token.
template <typename Kernel, typename Units, typename Rows, typename Write>
void multiply(const Kernel& kernel, const Units& units, int64_t work, int64_t tokens, int threads, const Rows& rows,
              const Write& write) {
  using T = typename Kernel::Element;
  thread_local Buffer buffer;
  const size_t elements = kernel.packed_elements(std::min(tokens, kChunkTokens));
  using Packed = typename Kernel::Packed;
  auto* packed = reinterpret_cast<Packed*>(buffer.reserve(elements * sizeof(Packed) / sizeof(float) + 1));
  constexpr int kPack = Kernel::kPackTokens;
  const int at_once = tokens * work > kMinParallelWork ? threads : 1;
  for (int64_t first = 0; first < tokens; first += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, tokens - first);
    parallel_chunks((count + kPack - 1) / kPack, count > kPackedAlone ? at_once : 1, [&](int64_t i) {
      const T* from[kPack];
      const int some = static_cast<int>(std::min<int64_t>(kPack, count - i * kPack));
      rows(first + i * kPack, some, from);
      kernel.pack(from, i * kPack, some, packed);
    });
    parallel(units.count(), at_once, [&](Chunks& chunks) {
      [[maybe_unused]] typename Kernel::Scope scope;
      for (int64_t i; chunks.claim(i);) {
        const auto unit = units[i];
        Vec sums[2][kBlockTokens];
        for (int64_t block = 0; block < count; block += kBlockTokens) {
          const int some = static_cast<int>(std::min<int64_t>(kBlockTokens, count - block));
          kernel.multiply(unit, packed, block, some, count, sums);
          for (int t = 0; t < some; t++) write(first + block + t, units.row(i), sums[0][t], sums[1][t]);
        }
      }
    });
  }
}

enum class Method : int64_t { kDot = 0, kAmx = 1 };

// The same by a method, x being of type T; false where this CPU or T has no such.
template <typename T, typename W, typename Rows, typename Write>
bool gemm_by(Method method, const Matrix<W>& weight, bool gated, int64_t tokens, int threads, const Rows& rows,
             const Write& write) {
  const Units<W> units(weight, gated);
  const int64_t work = weight.rows * weight.depth;
  if (method == Method::kDot) {
    multiply(DotKernel<T, W>(weight.depth), units, work, tokens, threads, rows, write);
    return true;
  }
#if defined(LAMINA_AMX)
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<W, BFloat16>) {
    if (!has_amx()) return false;
    multiply(AmxKernel(weight.depth), units, work, tokens, threads, rows, write);
    return true;
  }
#endif
#if defined(LAMINA_AMX) && defined(LAMINA_INT8_AS_BF16)
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<W, int8_t>) {
    if (!has_amx()) return false;
    multiply(AmxInt8Kernel(weight.depth), units, work, tokens, threads, rows, write);
    return true;
  }
#endif
  return false;
}

}  // namespace lamina
