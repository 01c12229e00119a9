// GEMM on a CPU by weights that are read once and where they lie: sum over k of x[token][k] * weight[row][k].
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "buffer.h"
#include "gemm_amx.h"
#include "int8.h"
#include "lane_ops.h"
#include "packing.h"
#include "strips.h"
#include "thread_pool.h"

namespace lamina {

constexpr int64_t kMinParallelWork = 1 << 17;  // multiply-adds below which waking threads costs more than it saves
// Short rows are fetched ahead of their use a whole unit further down, long ones so much further on in themselves:
// units are few where rows are long, and a thread's first one would come late, and what follows its last one for
// nothing.
constexpr int64_t kLongRow = 8192, kBytesAhead = 1024;  // bytes

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
  static constexpr bool kPacksTogether = false;
  struct Scope {};

  static int strips_at_once(int64_t) { return 2; }
  int64_t depth() const { return depth_; }

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

// The units of a GEMM: neighbouring strips, one or two, or with `gated` one of each half of the rows.
template <typename W>
class Units {
 public:
  Units(const Matrix<W>& weight, bool gated, int strips)
      : weight_(weight),
        gated_(gated),
        strips_(gated ? 2 : strips),
        half_(gated ? weight.rows / 2 : 0),
        step_(gated ? kLanes : strips * kLanes) {}

  int64_t count() const { return ((gated_ ? half_ : weight_.rows) + step_ - 1) / step_; }
  int64_t row(int64_t unit) const { return unit * step_; }
  Unit<W> operator[](int64_t unit) const {
    int64_t first = row(unit), second = gated_ ? half_ + first : first + kLanes;
    return {{weight_.strip(first, gated_ ? half_ : weight_.rows), weight_.strip(second, weight_.rows)}, step_, strips_};
  }

  // What of memory a unit, or -1 for none, will read.
  Unit<W> ahead(int64_t unit) const { return unit < 0 ? Unit<W>{{}, 0, 0} : (*this)[unit]; }

 private:
  Matrix<W> weight_;
  bool gated_;
  int strips_;
  int64_t half_, step_;
};

constexpr int64_t kChunkTokens = 512;  // packed at once: they stay in a core's own cache while the weights go by
constexpr int64_t kPackedAlone = 16;   // tokens that a thread packs before another one would have begun
constexpr int64_t kLinesInTurn = 16;   // of weights that a thread asks for between two looks at those it waits for

// The sums of a unit to the result.
template <typename Write>
void write_unit(const Write& write, int64_t token, int count, int64_t row, int strips, Vec (*sums)[kBlockTokens]) {
  for (int t = 0; t < count; t++)
    strips == 2 ? write(token + t, row, sums[0][t], sums[1][t]) : write(token + t, row, sums[0][t]);
}

// Weights for a thread, piece by piece: each comes to its own cache while the one before is multiplied.
template <typename Kernel, typename Units>
class Supply {
 public:
  Supply(const Kernel& kernel, const Units& units, int64_t tokens)
      : units_(units),
        depth_(kernel.depth()),
        strips_at_once_(Kernel::strips_at_once(tokens)),
        columns_at_once_(kernel.columns_at_once(tokens)) {}

  Fetch& fetch() { return fetch_; }

  // Aims at the first piece of a unit, or -1, unless that is what it did last.
  void begin(int64_t unit) {
    if (unit == begun_) return;
    begun_ = unit;
    aim(unit, 0, 0);
  }

  // body(piece, its first strip) for all of a unit in order, and for one piece where rows are empty. `next`: what this
  // thread will probably do then.
  template <typename Unit, typename Body>
  void each(int64_t unit, const Unit& strips, int64_t next, const Body& body) {
    begin(unit);
    for (int s = 0; s < strips.count; s += strips_at_once_) {
      int64_t from = 0, to;
      do {
        to = std::min(depth_, from + columns_at_once_);
        fetch_.rest();
        aim_behind(unit, s, to, s + strips_at_once_ < strips.count, next);
        body(Piece<typename Kernel::Element>{strips.strips + s, std::min(strips_at_once_, strips.count), from, to}, s);
        from = to;
      } while (to < depth_);
    }
  }

 private:
  // At what comes behind a piece that ends at a column.
  void aim_behind(int64_t unit, int strip, int64_t column, bool has_more, int64_t next) {
    if (column < depth_) return aim(unit, strip, column);
    if (has_more) return aim(unit, strip + strips_at_once_, 0);
    begin(next);
  }

  void aim(int64_t unit, int strip, int64_t from) {
    const auto read = units_.ahead(unit);
    const int count = std::min(strips_at_once_, read.count);
    fetch_.aim(read.strips + strip, count, from, std::min(depth_, from + columns_at_once_));
  }

  const Units& units_;
  const int64_t depth_;
  const int strips_at_once_;
  const int64_t columns_at_once_;
  Fetch fetch_;
  int64_t begun_ = -1;
};

// A thread's part of a GEMM of tokens first .. first + count, which are packed.
template <typename Kernel, typename Units, typename Write>
void multiply_units(const Kernel& kernel, const Units& units, Chunks& chunks, const typename Kernel::Packed* packed,
                    int64_t first, int64_t count, Supply<Kernel, Units>& supply, const Write& write) {
  for (int64_t i; chunks.claim(i);) {
    const auto unit = units[i];
    Vec sums[2][kBlockTokens];
    const auto finish = [&](int64_t block, const auto& each) {
      const int some = static_cast<int>(std::min<int64_t>(kBlockTokens, count - block));
      each([&](const auto& piece, int s) {
        kernel.multiply(piece, packed, block, some, count, sums + s, supply.fetch());
      });
      write_unit(write, first + block, some, units.row(i), unit.count, sums);
    };
    finish(0, [&](const auto& body) { supply.each(i, unit, chunks.next(), body); });
    for (int64_t block = kBlockTokens; block < count; block += kBlockTokens)
      finish(block, [&](const auto& body) {
        body(Piece<typename Kernel::Element>{unit.strips, unit.count, 0, kernel.depth()}, 0);
      });
  }
}

// Tokens first .. first + count by threads that pack them together, and meanwhile ask for their first weights.
template <typename Kernel, typename Units, typename Get, typename Write>
void multiply_together(const Kernel& kernel, const Units& units, int64_t first, int64_t count, int threads,
                       const Rows<Get>& rows, typename Kernel::Packed* packed, const Write& write) {
  thread_local Buffer buffer;
  using T = typename Kernel::Element;
  const size_t elements = rows.are_made ? count * kernel.depth() : 0;
  T* made = reinterpret_cast<T*>(buffer.reserve(elements * sizeof(T) / sizeof(float) + 1));
  Packing<Kernel, Get> packing(kernel, rows, first, count, made, packed);
  parallel(units.count(), threads, [&](Chunks& chunks) {
    typename Kernel::Scope scope;
    Supply<Kernel, Units> supply(kernel, units, count);
    supply.begin(chunks.next());
    packing.run(chunks, [&supply] { supply.fetch().lines(kLinesInTurn); });
    multiply_units(kernel, units, chunks, packed, first, count, supply, write);
  });
}

// The same by threads that find x packed, where that takes no time, or have packed it in a job of its own.
template <typename Kernel, typename Units, typename Get, typename Write>
void multiply_behind(const Kernel& kernel, const Units& units, int64_t first, int64_t count, int threads,
                     const Rows<Get>& rows, typename Kernel::Packed* packed, const Write& write) {
  using T = typename Kernel::Element;
  constexpr int kPack = Kernel::kPackTokens;
  parallel_chunks((count + kPack - 1) / kPack, count > kPackedAlone ? threads : 1, [&](int64_t i) {
    thread_local Buffer buffer;
    const int64_t elements = rows.are_made ? kPack * kernel.depth() : 0;
    T* made = reinterpret_cast<T*>(buffer.reserve(elements * sizeof(T) / sizeof(float) + 1));
    const T* from[kPack];
    const int some = static_cast<int>(std::min<int64_t>(kPack, count - i * kPack));
    for (int t = 0; t < some; t++) from[t] = rows.get(first + i * kPack + t, made + t * kernel.depth());
    kernel.pack(from, i * kPack, some, packed);
  });
  parallel(units.count(), threads, [&](Chunks& chunks) {
    [[maybe_unused]] typename Kernel::Scope scope;
    for (int64_t i; chunks.claim(i);) {
      const auto unit = units[i];
      Vec sums[2][kBlockTokens];
      for (int64_t block = 0; block < count; block += kBlockTokens) {
        const int some = static_cast<int>(std::min<int64_t>(kBlockTokens, count - block));
        kernel.multiply(unit, packed, block, some, count, sums);
        write_unit(write, first + block, some, units.row(i), unit.count, sums);
      }
    }
  });
}

// Calls write(token, row, sums of a strip, those of the second where there are two) for every token and unit. `work`:
// multiply-adds a token.
template <typename Kernel, typename Units, typename Get, typename Write>
void multiply(const Kernel& kernel, const Units& units, int64_t work, int64_t tokens, int threads,
              const Rows<Get>& rows, const Write& write) {
  thread_local Buffer buffer;
  const size_t elements = kernel.packed_elements(std::min(tokens, kChunkTokens));
  using Packed = typename Kernel::Packed;
  auto* packed = reinterpret_cast<Packed*>(buffer.reserve(elements * sizeof(Packed) / sizeof(float) + 1));
  const int at_once = tokens * work > kMinParallelWork ? threads : 1;
  for (int64_t first = 0; first < tokens; first += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, tokens - first);
    if constexpr (Kernel::kPacksTogether)
      multiply_together(kernel, units, first, count, at_once, rows, packed, write);
    else
      multiply_behind(kernel, units, first, count, at_once, rows, packed, write);
  }
}

enum class Method : int64_t { kDot = 0, kAmx = 1 };

// The same by a method, x being of type T; false where this CPU or T has no such.
template <typename T, typename W, typename Get, typename Write>
bool gemm_by(Method method, const Matrix<W>& weight, bool gated, int64_t tokens, int threads, const Rows<Get>& rows,
             const Write& write) {
  const int64_t work = weight.rows * weight.depth;
  const auto by = [&](const auto& kernel) {
    multiply(kernel, Units<W>(weight, gated, kernel.strips_at_once(tokens)), work, tokens, threads, rows, write);
    return true;
  };
  if (method == Method::kDot) return by(DotKernel<T, W>(weight.depth));
#if defined(LAMINA_AMX)
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<W, BFloat16>) {
    return has_amx() && by(AmxKernel(weight.depth));
  }
#endif
#if defined(LAMINA_AMX) && defined(LAMINA_INT8_AS_BF16)
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<W, int8_t>) {
    return has_amx() && by(AmxInt8Kernel(weight.depth));
  }
#endif
  return false;
}

}  // namespace lamina
