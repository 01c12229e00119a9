// GEMM by AMX tiles: 16 rows of weights, where they lie, times 16 packed tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "buffer.h"
#include "int8.h"
#include "strips.h"

namespace lamina {

constexpr int kBlockTokens = 64;  // of which a unit's sums are kept before they are written

#if defined(LAMINA_AMX)

class AmxKernel {
 public:
  using Element = BFloat16;
  using Packed = BFloat16;
  static_assert(kLanes == kTileRows, "a strip is a tile");

  explicit AmxKernel(int64_t depth) : depth_(depth), group_((depth + kTileDepth - 1) / kTileDepth * kTileElements) {}

  static constexpr int kPackTokens = kTileRows, kStep = kTileDepth;
  static constexpr bool kPacksTogether = true;
  using Scope = AmxScope;

  // Strips that are multiplied together: of few tokens memory decides, and one at a time is read in its order; of many
  // each tile that is loaded should be used twice.
  static int strips_at_once(int64_t tokens) { return tokens <= 2 * kTileRows ? 1 : 2; }

  // Columns of a piece: of few tokens so many that two pieces are a small part of a core's second cache.
  int64_t columns_at_once(int64_t tokens) const {
    return tokens <= 2 * kTileRows ? std::min<int64_t>(2048, depth_) : depth_;
  }

  int64_t depth() const { return depth_; }
  size_t packed_elements(int64_t tokens) const { return (tokens + kTileRows - 1) / kTileRows * group_; }

  // Columns from .. to of up to 16 rows of x, the first of which is token `token`.
  void pack(const BFloat16* const* rows, int64_t token, int count, int64_t from, int64_t to, BFloat16* x) const {
    x += token / kTileRows * group_ + from / kTileDepth * kTileElements;
    for (int64_t k = from; k < to; k += kTileDepth, x += kTileElements) pack_tile(rows, count, k, depth_ - k, x);
  }

  // A piece times tokens first .. first + tokens of `all`; meanwhile a part of what `fetch` aims at comes. Sums stay in
  // the tiles until a piece is the last of its rows, and of few tokens alone a row has several.
  void multiply(const Piece<BFloat16>& piece, const BFloat16* x, int64_t first, int tokens, int64_t all,
                Vec (*sums)[kBlockTokens], Fetch& fetch) const {
    const int64_t blocks = (all + 2 * kTileRows - 1) / (2 * kTileRows);
    const int64_t lines = (piece.count * kTileRows + blocks - 1) / blocks;  // a strip has a line a row and step
    x += first / kTileRows * group_;
    for (int t = 0; t < tokens; t += 2 * kTileRows, x += 2 * group_) {
      const bool is_one_group = tokens - t <= kTileRows;
      const auto block = piece.count == 1 ? is_one_group ? &AmxKernel::block<1, 1> : &AmxKernel::block<1, 2>
                         : is_one_group   ? &AmxKernel::block<2, 1>
                                          : &AmxKernel::block<2, 2>;
      (this->*block)(piece, x, sums, t, fetch, lines);
    }
  }

 private:
  template <int num_strips, int groups>
  void block(const Piece<BFloat16>& piece, const BFloat16* x, Vec (*sums)[kBlockTokens], int t, Fetch& fetch,
             int64_t lines) const {
    TileRows rows[num_strips];
    for (int s = 0; s < num_strips; s++) {
      const Strip<BFloat16>& strip = piece.strips[s];
      rows[s] = {strip.data + piece.from, strip.stride, strip.count};
    }
    if (piece.from == 0) clear_sums();
    add_tiles<num_strips, groups>(rows, x + piece.from * kTileRows, group_, piece.to - piece.from, fetch, lines);
    if (piece.to == depth_) store_sums<num_strips, groups>(sums[0] + t, num_strips == 2 ? sums[1] + t : nullptr);
  }

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
  static constexpr bool kPacksTogether = false;
  using Scope = AmxScope;

  static int strips_at_once(int64_t) { return 2; }
  int64_t depth() const { return depth_; }
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
      tokens - t <= kTileRows ? store_sums<2, 1>(sums[0] + t, sums[1] + t) : store_sums<2, 2>(sums[0] + t, sums[1] + t);
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
    tokens <= kTileRows ? store_sums<2, 1>(sums[0], sums[1]) : store_sums<2, 2>(sums[0], sums[1]);
  }

  int64_t group() const { return padded_ * kTileRows; }

  void add(int tokens, const std::array<TileRows, 2>& strips, const BFloat16* x, int64_t count) const {
    Fetch nothing;
    tokens <= kTileRows ? add_tiles<2, 1>(strips.data(), x, group(), count, nothing, 0)
                        : add_tiles<2, 2>(strips.data(), x, group(), count, nothing, 0);
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

}  // namespace lamina
