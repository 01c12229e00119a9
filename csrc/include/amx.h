// AMX: bfloat16 tile multiply-accumulate, for CPUs that have it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "strips.h"
#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define LAMINA_AMX 1
#include "tiles.h"
#endif

namespace lamina {

constexpr int kTileRows = 16;                          // of weights, or of tokens
constexpr int kTileDepth = 32;                         // elements of a row in a tile
constexpr int kTileElements = kTileRows * kTileDepth;  // 1 KB

#if defined(LAMINA_AMX)

// Eight full tiles for as long as it lives, then the thread's configuration as it was: others keep theirs too.
class AmxScope {
 public:
  AmxScope() {
    _tile_storeconfig(before_);
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = kTileRows;
    asm volatile("" ::"r"(&config) : "memory");  // gcc 12 takes the load for one of 8 bytes and drops the rest
    _tile_loadconfig(&config);
  }
  ~AmxScope() {
    asm volatile("" ::"r"(before_) : "memory");
    _tile_loadconfig(before_);  // of all zeros, as where there was none, releases the tiles
  }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64, "what the instruction loads");
  alignas(64) uint8_t before_[64];
};

// Tokens [16] x depth [32] as one tile: row p holds elements 2p and 2p + 1 of every token, interleaved.
inline void pack_tile(const BFloat16* const* tokens, int num_tokens, int64_t from, int64_t count, BFloat16* tile) {
  Vec rows[kTileRows];
  for (int t = 0; t < kTileRows; t++) rows[t] = t < num_tokens ? load_pairs(tokens[t] + from, count) : Vec{};
  transpose(rows);
  for (int p = 0; p < kTileRows; p++) std::memcpy(tile + p * kTileDepth, &rows[p], sizeof(Vec));
}

// Sixteen rows of weights where they lie; what is missing of a tile, at the end of the matrix, is zero.
struct TileRows {
  const BFloat16* data;
  int64_t stride;  // in elements
  int count;

  // A tile's address and the bytes between its rows: a copy in `spare` where the matrix does not fill it.
  const BFloat16* tile(int64_t from, int64_t depth, BFloat16* spare, int64_t* row_bytes) const {
    int64_t left = depth - from;
    if (count == kTileRows && left >= kTileDepth) {
      *row_bytes = stride * 2;
      return data + from;
    }
    std::memset(spare, 0, kTileElements * sizeof(BFloat16));
    for (int r = 0; r < count; r++)
      std::memcpy(spare + r * kTileDepth, data + r * stride + from, std::min<int64_t>(left, kTileDepth) * 2);
    *row_bytes = kTileDepth * 2;
    return spare;
  }
};

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Adds to the sums one or two strips times one or two groups of packed tokens, each `group_size` elements. With each
// step `lines` of what comes next are asked for.
template <int num_strips, int groups>
inline void add_tiles(const TileRows* strips, const BFloat16* x, int64_t group_size, int64_t depth, Fetch& fetch,
                      int64_t lines) {
  alignas(64) BFloat16 spare[2][kTileElements];
  for (int64_t from = 0; from < depth; from += kTileDepth, x += kTileElements) {
    int64_t row_bytes;
    const BFloat16* a = strips[0].tile(from, depth, spare[0], &row_bytes);
    load_tile<4>(a, row_bytes);
    stream_tile<6>(x);
    _tile_dpbf16ps(0, 4, 6);
    if (num_strips == 2) {
      const BFloat16* b = strips[1].tile(from, depth, spare[1], &row_bytes);
      load_tile<5>(b, row_bytes);
      _tile_dpbf16ps(1, 5, 6);
    }
    fetch.lines(lines);
    if (groups == 2) {
      stream_tile<7>(x + group_size);
      _tile_dpbf16ps(2, 4, 7);
      if (num_strips == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// sums[strip][16 g + t], lane r: row r of a strip times token t of group g.
template <int num_strips, int groups>
inline void store_sums(Vec* first, Vec* second) {
  _tile_stored(0, first, 64);
  transpose(first);
  if (num_strips == 2) {
    _tile_stored(1, second, 64);
    transpose(second);
  }
  if (groups == 2) {
    _tile_stored(2, first + kTileRows, 64);
    transpose(first + kTileRows);
  }
  if (num_strips == 2 && groups == 2) {
    _tile_stored(3, second + kTileRows, 64);
    transpose(second + kTileRows);
  }
}

#else

inline bool has_amx() { return false; }

#endif

}  // namespace lamina
