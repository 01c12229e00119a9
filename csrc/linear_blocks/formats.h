// GGUF's blocks of weights, those of sixteen rows interleaved: where scales, minimums and numbers lie.
//
// A block has regions, each of units of some bytes; interleaved, a region has its first unit of all sixteen rows, then
// the second, and so on. A weight is (number - kOffset) * scale + minimum of its span of 32 columns, or half of one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "byte_dot.h"

namespace lamina {

constexpr int kGroupRows = 16;
constexpr int kChunks = 8;  // of four columns, in a span
constexpr int kChunkBytes = 4 * kGroupRows;

struct Region {
  int bytes, unit;  // of one row
};

// Reads a block of some of the sixteen rows, from row `first` on.
class BlockReader {
 protected:
  BlockReader(const uint8_t* block, int first) : block_(block), first_(first) {}

  Vec halves(int region) const { return load(reinterpret_cast<const Float16*>(block_ + region) + first_); }
  IntVec bytes(int region, int unit) const { return load_bytes(block_ + region + kGroupRows * unit + first_); }
  ByteVec chunk(int region, int index) const {
    return load_byte_vec(block_ + region + kChunkBytes * index + 4 * first_);
  }
  // Numbers of four bits: the first half of a span in the lower bits of its bytes, the second in the upper ones.
  void split_nibbles(int region, ByteVec* numbers) const {
    for (int c = 0; c < kChunks / 2; c++) {
      const ByteVec both = chunk(region, c);
      numbers[c] = both & 15, numbers[c + kChunks / 2] = both >> 4;
    }
  }

 private:
  const uint8_t* block_;
  int first_;
};

struct Q4_0 : BlockReader {
  static constexpr Region kRegions[] = {{2, 2}, {16, 4}};
  static constexpr int kColumns = 32, kBytes = 18, kOffset = 8, kScales = 1;
  static constexpr bool kHasMinimum = false, kIsWide = false;
  Q4_0(const uint8_t* block, int first) : BlockReader(block, first) {}
  Vec scale(int, int) const { return halves(0); }
  Vec minimum(int) const { return Vec{}; }
  void unpack(int, ByteVec* numbers) const { split_nibbles(2 * kGroupRows, numbers); }
};

struct Q4_1 : BlockReader {
  static constexpr Region kRegions[] = {{2, 2}, {2, 2}, {16, 4}};
  static constexpr int kColumns = 32, kBytes = 20, kOffset = 0, kScales = 1;
  static constexpr bool kHasMinimum = true, kIsWide = false;
  Q4_1(const uint8_t* block, int first) : BlockReader(block, first) {}
  Vec scale(int, int) const { return halves(0); }
  Vec minimum(int) const { return halves(2 * kGroupRows); }
  void unpack(int, ByteVec* numbers) const { split_nibbles(4 * kGroupRows, numbers); }
};

struct Q8_0 : BlockReader {
  static constexpr Region kRegions[] = {{2, 2}, {32, 4}};
  static constexpr int kColumns = 32, kBytes = 34, kOffset = 128, kScales = 1;
  static constexpr bool kHasMinimum = false, kIsWide = true;
  Q8_0(const uint8_t* block, int first) : BlockReader(block, first) {}
  Vec scale(int, int) const { return halves(0); }
  Vec minimum(int) const { return Vec{}; }
  void unpack(int, ByteVec* numbers) const {
    for (int c = 0; c < kChunks; c++) numbers[c] = chunk(2 * kGroupRows, c) ^ 128;
  }
};

struct Q4_K : BlockReader {
  static constexpr Region kRegions[] = {{2, 2}, {2, 2}, {12, 1}, {128, 4}};
  static constexpr int kColumns = 256, kBytes = 144, kOffset = 0, kScales = 1;
  static constexpr bool kHasMinimum = true, kIsWide = false;
  Q4_K(const uint8_t* block, int first) : BlockReader(block, first) {}
  Vec scale(int span, int) const {
    const IntVec six = span < 4 ? packed(span) & 63 : (packed(span + 4) & 15) | (packed(span - 4) >> 6 << 4);
    return halves(0) * __builtin_convertvector(six, Vec);
  }
  Vec minimum(int span) const {
    const IntVec six = span < 4 ? packed(span + 4) & 63 : (packed(span + 4) >> 4) | (packed(span) >> 6 << 4);
    return -halves(2 * kGroupRows) * __builtin_convertvector(six, Vec);
  }
  void unpack(int span, ByteVec* numbers) const {
    for (int c = 0; c < kChunks; c++) {
      const ByteVec both = chunk(16 * kGroupRows, span / 2 * kChunks + c);
      numbers[c] = span % 2 ? both >> 4 : both & 15;
    }
  }

 private:
  IntVec packed(int index) const { return bytes(4 * kGroupRows, index); }
};

struct Q6_K : BlockReader {
  static constexpr Region kRegions[] = {{128, 4}, {64, 4}, {16, 1}, {2, 2}};
  static constexpr int kColumns = 256, kBytes = 210, kOffset = 32, kScales = 2;
  static constexpr bool kHasMinimum = false, kIsWide = false;
  Q6_K(const uint8_t* block, int first) : BlockReader(block, first) {}
  Vec scale(int span, int half) const {
    const IntVec whole = bytes(192 * kGroupRows, 2 * span + half) << 24 >> 24;
    return halves(208 * kGroupRows) * __builtin_convertvector(whole, Vec);
  }
  Vec minimum(int) const { return Vec{}; }
  void unpack(int span, ByteVec* numbers) const {
    const int of_half = span / 4, quarter = span % 4;
    for (int c = 0; c < kChunks; c++) {
      const IntVec low = (IntVec)chunk(0, 16 * of_half + 8 * (quarter % 2) + c) >> 4 * (quarter / 2);
      const IntVec high = (IntVec)chunk(128 * kGroupRows, 8 * of_half + c) >> 2 * quarter;
      numbers[c] = (ByteVec)((low & 0x0f0f0f0f) | (high & 0x03030303) << 4);
    }
  }
};

template <typename Format>
struct FormatTag {
  using Type = Format;
};

constexpr int64_t kNumKinds = 5;  // custom_ops/linear_blocks/layout.py has the same numbers

// body(tag) with the format of a kind, which must be one of them.
template <typename Body>
inline auto with_format(int64_t kind, const Body& body) {
  switch (kind) {
    case 0:
      return body(FormatTag<Q4_0>());
    case 1:
      return body(FormatTag<Q4_1>());
    case 2:
      return body(FormatTag<Q8_0>());
    case 3:
      return body(FormatTag<Q4_K>());
    case 4:
      return body(FormatTag<Q6_K>());
    default:
      std::abort();
  }
}

// `count` rows of whole blocks, each where it lies, as a group of sixteen; what is missing of those is zero.
template <typename Format>
inline void interleave(const uint8_t* rows, int count, int64_t blocks, uint8_t* group) {
  std::memset(group, 0, blocks * Format::kBytes * kGroupRows);
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* from = rows + b * Format::kBytes;
    for (const Region& region : Format::kRegions) {
      for (int at = 0; at < region.bytes; at += region.unit, group += region.unit * kGroupRows, from += region.unit)
        for (int r = 0; r < count; r++)
          std::memcpy(group + r * region.unit, from + r * blocks * Format::kBytes, region.unit);
    }
  }
}

}  // namespace lamina
