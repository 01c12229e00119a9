// AMX: bfloat16 tile multiply-accumulate, for CPUs that have it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define LAMINA_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lamina {

constexpr int kTileRows = 16;                          // of weights, or of tokens
constexpr int kTileDepth = 32;                         // elements of a row in a tile
constexpr int kTileElements = kTileRows * kTileDepth;  // 1 KB

#if defined(LAMINA_AMX)

// Whether the system lets this process use AMX tiles; asks it once (arch_prctl).
inline bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

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

  void prefetch(int64_t from, int64_t rows_ahead) const {
    for (int r = 0; r < kTileRows; r++)
      __builtin_prefetch(reinterpret_cast<const char*>(data + (r + rows_ahead) * stride + from), 0, 2);
  }
};

// The compiler's own ask for literals, and do not say that memory is read.
template <int tile>
inline void load_tile(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(tile) : "memory");
}

template <int tile>
inline void stream_tile(const void* from) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(tile) : "memory");
}

template <int tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// sums += a @ b
template <int sums, int a, int b>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

// Prefetch beside a block of tokens, every `period`th tile, after `steps`: what lies `columns` further on in the rows,
// and behind their end in the strips `rows` further down.
struct Prefetch {
  int64_t rows, columns;
  int period, steps;

  void tiles(const TileRows* strips, int64_t from, int64_t depth) const {
    const int64_t at = from + columns;
    const bool is_below = at >= depth;
    for (int s = 0; s < 2; s++) strips[s].prefetch(is_below ? at - depth : at, is_below ? rows : 0);
  }
};

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Adds to the sums two strips times one or two groups of packed tokens, each `group_size` elements.
template <int groups>
inline void add_tiles(const TileRows* strips, const BFloat16* x, int64_t group_size, int64_t depth, Prefetch ahead) {
  alignas(64) BFloat16 spare[2][kTileElements];
  for (int64_t from = 0; from < depth; from += kTileDepth, x += kTileElements) {
    int64_t row_bytes[2];
    const BFloat16* a = strips[0].tile(from, depth, spare[0], &row_bytes[0]);
    const BFloat16* b = strips[1].tile(from, depth, spare[1], &row_bytes[1]);
    load_tile<4>(a, row_bytes[0]);
    stream_tile<6>(x);
    _tile_dpbf16ps(0, 4, 6);
    load_tile<5>(b, row_bytes[1]);
    _tile_dpbf16ps(1, 5, 6);
    if (--ahead.steps < 0) {
      ahead.tiles(strips, from, depth);
      ahead.steps = ahead.period - 1;
    }
    if (groups == 2) {
      stream_tile<7>(x + group_size);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// sums[strip][16 g + t], lane r: row r of a strip times token t of group g.
template <int groups>
inline void store_sums(Vec* first, Vec* second) {
  _tile_stored(0, first, 64);
  _tile_stored(1, second, 64);
  transpose(first);
  transpose(second);
  if (groups == 2) {
    _tile_stored(2, first + kTileRows, 64);
    _tile_stored(3, second + kTileRows, 64);
    transpose(first + kTileRows);
    transpose(second + kTileRows);
  }
}

#else

inline bool has_amx() { return false; }

#endif

}  // namespace lamina
