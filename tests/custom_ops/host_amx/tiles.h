// csrc/include/tiles.h in plain C++: AMX tiles in a thread's memory, for CPUs that have none.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lamina {

inline bool has_amx() { return true; }

struct Tiles {
  static constexpr int kRows = 16, kFloats = 16;
  float rows[8][kRows][kFloats];
  bool is_configured;
};
inline thread_local Tiles tiles{};

// A configuration of all zeros releases the tiles.
inline void store_tile_config(void* to) {
  std::memset(to, 0, 64);
  *static_cast<uint8_t*>(to) = tiles.is_configured;
}
inline void load_tile_config(const void* from) { tiles.is_configured = *static_cast<const uint8_t*>(from) != 0; }

// Instructions of a thread without tiles end its process, as the CPU would.
inline float (*rows_of(int tile)) [Tiles::kFloats] {
  if (!tiles.is_configured) __builtin_trap();
  return tiles.rows[tile];
}

inline void read_tile(int tile, const void* from, int64_t row_bytes) {
  auto* rows = rows_of(tile);
  for (int r = 0; r < Tiles::kRows; r++) std::memcpy(rows[r], static_cast<const char*>(from) + r * row_bytes, 64);
}

inline void write_tile(int tile, void* to, int64_t row_bytes) {
  auto* rows = rows_of(tile);
  for (int r = 0; r < Tiles::kRows; r++) std::memcpy(static_cast<char*>(to) + r * row_bytes, rows[r], 64);
}

inline void clear_tile(int tile) { std::memset(rows_of(tile), 0, sizeof(tiles.rows[tile])); }

inline float half_of(float pair, bool is_second) {
  uint32_t bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  bits = is_second ? bits & 0xffff0000u : bits << 16;
  std::memcpy(&pair, &bits, sizeof(bits));
  return pair;
}

// Products of first halves and of second ones are summed apart, in the order of the pairs, and then added to the sums.
inline void multiply_pairs(int sums, int a, int b) {
  auto *to = rows_of(sums), *left = rows_of(a), *right = rows_of(b);
  for (int r = 0; r < Tiles::kRows; r++) {
    float parts[2][Tiles::kFloats] = {};
    for (int pair = 0; pair < Tiles::kFloats; pair++)
      for (int half = 0; half < 2; half++)
        for (int c = 0; c < Tiles::kFloats; c++)
          parts[half][c] += half_of(left[r][pair], half) * half_of(right[pair][c], half);
    for (int c = 0; c < Tiles::kFloats; c++) to[r][c] += parts[0][c] + parts[1][c];
  }
}

template <int tile>
inline void load_tile(const void* from, int64_t row_bytes) {
  read_tile(tile, from, row_bytes);
}

template <int tile>
inline void stream_tile(const void* from) {
  read_tile(tile, from, 64);
}

template <int tile>
inline void zero_tile() {
  clear_tile(tile);
}

template <int sums, int a, int b>
inline void multiply_tiles() {
  multiply_pairs(sums, a, b);
}

}  // namespace lamina

#undef _tile_storeconfig
#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_storeconfig(to) lamina::store_tile_config(to)
#define _tile_loadconfig(from) lamina::load_tile_config(from)
#define _tile_zero(tile) lamina::clear_tile(tile)
#define _tile_loadd(tile, from, row_bytes) lamina::read_tile(tile, from, row_bytes)
#define _tile_stored(tile, to, row_bytes) lamina::write_tile(tile, to, row_bytes)
#define _tile_dpbf16ps(sums, a, b) lamina::multiply_pairs(sums, a, b)
