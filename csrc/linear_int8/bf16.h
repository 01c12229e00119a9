// Weights of one byte as bfloat16, which holds them exactly, for the machine's products of bfloat16.
#pragma once

#include "kernel.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define LAMINA_INT8_AS_BF16 1

namespace lamina::bf16 {

constexpr int kStep = 64;  // weights that one register of bytes holds
constexpr int kHalf = 32;  // bfloat16 that a register holds
static_assert(kGroup == kLanes, "a group's sums fill one register");

// The two bytes of the bfloat16 of 0 to 127, one a lane.
struct Tables {
  __m512i low[2], high[2];

  Tables() {
    alignas(64) uint8_t bytes[2][128];
    for (int value = 0; value < 128; value++) {
      const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(value));
      bytes[0][value] = static_cast<uint8_t>(bits >> 16), bytes[1][value] = static_cast<uint8_t>(bits >> 24);
    }
    for (int half = 0; half < 2; half++) {
      low[half] = _mm512_load_si512(bytes[0] + half * 64);
      high[half] = _mm512_load_si512(bytes[1] + half * 64);
    }
  }
};

// 64 weights as two registers of bfloat16: the first has the lower half of each 16 bytes, the second the upper.
inline void widen(const Tables& tables, __m512i bytes, __m512i& first, __m512i& second) {
  const __m512i size = _mm512_abs_epi8(bytes);
  const __m512i low = _mm512_permutex2var_epi8(tables.low[0], size, tables.low[1]);
  __m512i high = _mm512_permutex2var_epi8(tables.high[0], size, tables.high[1]);
  high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xf8);  // high | (bytes & sign)
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

inline int64_t num_steps(int64_t k) { return (k + kStep - 1) / kStep; }

inline __m512i load_bytes(const int8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi8(count >= kStep ? ~0ull : (1ull << count) - 1, from);
}

// 64 elements of a token in the order of `widen`, zeros beyond `count`.
inline void load_token(const BFloat16* from, int64_t count, __m512i& first, __m512i& second) {
  const auto some = [&](int64_t start) {
    const int64_t left = std::max<int64_t>(0, count - start);
    return _mm512_maskz_loadu_epi16(left >= kHalf ? ~0u : (1u << left) - 1, from + start);
  };
  const __m512i a = some(0), b = some(kHalf);
  first = _mm512_shuffle_i64x2(a, b, 0x88);
  second = _mm512_shuffle_i64x2(a, b, 0xdd);
}

// One token: every weight is met once, so the product is bound by reading it.
namespace few {

constexpr int kRows = 4;
constexpr int kAhead = 4096;  // bytes that are asked for before they are needed

// A token in the order of the weights, [num_steps][64].
inline void pack(const LinearInt8<BFloat16>& a, int64_t token, BFloat16* to) {
  for (int64_t step = 0; step < num_steps(a.k); step++, to += kStep) {
    __m512i first, second;
    load_token(a.x + token * a.x_stride + step * kStep, a.k - step * kStep, first, second);
    _mm512_store_si512(to, first), _mm512_store_si512(to + kHalf, second);
  }
}

template <int tokens>
void dot(const Tables& tables, const int8_t* const* rows, const BFloat16* x, int64_t k, Vec (*sums)[kGroup],
         int first_row) {
  __m512 even[kRows][tokens] = {}, odd[kRows][tokens] = {};
  const int64_t stride = num_steps(k) * kStep;
  for (int64_t i = 0; i < k; i += kStep)
    for (int r = 0; r < kRows; r++) {
      _mm_prefetch(rows[r] + i + kAhead, _MM_HINT_T0);
      __m512i first, second;
      widen(tables, load_bytes(rows[r] + i, k - i), first, second);
      for (int t = 0; t < tokens; t++) {
        const BFloat16* from = x + t * stride + i;
        even[r][t] = _mm512_dpbf16_ps(even[r][t], (__m512bh)first, (__m512bh)_mm512_load_si512(from));
        odd[r][t] = _mm512_dpbf16_ps(odd[r][t], (__m512bh)second, (__m512bh)_mm512_load_si512(from + kHalf));
      }
    }
  for (int r = 0; r < kRows; r++)
    for (int t = 0; t < tokens; t++) sums[t][first_row + r] = (Vec)(even[r][t] + odd[r][t]);
}

// All tokens, packed before, by the rows of one group.
template <int tokens>
void multiply_group(const LinearInt8<BFloat16>& a, const Tables& tables, const BFloat16* x, int64_t group) {
  Vec sums[tokens][kGroup];
  for (int first = 0; first < kGroup; first += kRows) {
    const int8_t* rows[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = a.weight + std::min(group * kGroup + first + r, a.n - 1) * a.k;
    dot<tokens>(tables, rows, x, a.k, sums, first);
  }
  for (int t = 0; t < tokens; t++) {
    transpose(sums[t]);
    Vec total = {};
    for (const Vec& lanes : sums[t]) total += lanes;
    a.finish(reinterpret_cast<const float*>(&total), t, group);
  }
}

}  // namespace few

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define LAMINA_INT8_BY_TILES 1

// Many tokens: tiles of 16 weight rows by 32 columns and of 32 columns by 16 tokens.
namespace tiles {

constexpr int kTokens = 16, kTile = 512;  // tokens and elements of a tile
constexpr int kPair = 2;                  // groups, and tiles of tokens, that share what they load
constexpr int kFewSteps = 2;              // steps of weights that stay in the first cache until they are used

struct alignas(64) Shape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles as this file wants them; they are given back as they were found, since oneDNN remembers how it left its own.
class Configured {
 public:
  Configured() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    load(Shape());
  }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
  ~Configured() { load(before_); }

 private:
  // gcc 12's own function says that it reads 8 bytes, and the rest is not written before it.
  static void load(const Shape& shape) { asm volatile("ldtilecfg %0" ::"m"(shape)); }
  Shape before_;
};

// Of the compiler's own, some want the tile's number as a literal, and none says that memory is read.
template <int tile>
inline void load_tile(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(64l), "i"(tile) : "memory");
}

template <int tile>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(64l), "i"(tile) : "memory");
}

template <int sums, int weights, int tokens>
inline void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weights), "i"(tokens));
}

// 16 tokens by 64 columns as two tiles of pairs of columns; tokens and columns that are not there are zero.
inline void pack(const LinearInt8<BFloat16>& a, int64_t tile, int64_t step, BFloat16* to) {
  Vec rows[2][kTokens] = {};
  const int64_t first = tile * kTokens, tokens = std::min<int64_t>(kTokens, a.num_tokens - first);
  for (int64_t t = 0; t < tokens; t++) {
    const BFloat16* from = a.x + (first + t) * a.x_stride + step * kStep;
    load_token(from, a.k - step * kStep, (__m512i&)rows[0][t], (__m512i&)rows[1][t]);
  }
  for (int half = 0; half < 2; half++) {
    transpose(rows[half]);
    std::memcpy(to + half * kTile, rows[half], sizeof(rows[half]));
  }
}

// Steps [first, last) of the rows of a group as tiles, two a step.
inline void widen_group(const LinearInt8<BFloat16>& a, const Tables& tables, int64_t group, int64_t first, int64_t last,
                        BFloat16* to) {
  const int64_t rows = a.rows(group);
  for (int64_t r = 0; r < kGroup; r++) {
    const int8_t* row = a.weight + (group * kGroup + r) * a.k;
    for (int64_t step = first; step < last; step++) {
      __m512i bytes = {}, low, high;
      if (r < rows) {
        _mm_prefetch(row + step * kStep + kPair * kGroup * a.k, _MM_HINT_T1);  // where the next groups have it
        bytes = load_bytes(row + step * kStep, a.k - step * kStep);
      }
      widen(tables, bytes, low, high);
      BFloat16* tile = to + (step - first) * 2 * kTile + r * kHalf;
      _mm512_store_si512(tile, low), _mm512_store_si512(tile + kTile, high);
    }
  }
}

// Tiles 0 to 3 are sums, [group][tokens]; 4 and 5 weights, 6 and 7 tokens. A row of any of them has 64 bytes.
template <int groups, int token_tiles>
void accumulate(const BFloat16* const* weights, const BFloat16* const* tokens, int64_t count) {
  for (int64_t i = 0; i < count * kTile; i += kTile) {
    load_tile<4>(weights[0] + i);
    if constexpr (groups > 1) load_tile<5>(weights[1] + i);
    load_tile<6>(tokens[0] + i);
    multiply_tile<0, 4, 6>();
    if constexpr (groups > 1) multiply_tile<2, 5, 6>();
    if constexpr (token_tiles > 1) {
      load_tile<7>(tokens[1] + i);
      multiply_tile<1, 4, 7>();
      if constexpr (groups > 1) multiply_tile<3, 5, 7>();
    }
  }
}

template <int tile>
void finish(const LinearInt8<BFloat16>& a, int64_t group, int64_t token_tile) {
  Vec sums[kGroup];
  store_tile<tile>(sums);
  transpose(sums);
  const int64_t first = token_tile * kTokens, last = std::min(first + kTokens, a.num_tokens);
  for (int64_t token = first; token < last; token++)
    a.finish(reinterpret_cast<const float*>(&sums[token - first]), token, group);
}

// One or two groups by all tokens, packed before as [tile][num_steps][2] tiles; `scratch` takes their weights.
template <int groups>
void multiply_groups(const LinearInt8<BFloat16>& a, const Tables& tables, const BFloat16* x, int64_t group,
                     BFloat16* scratch) {
  const int64_t steps = num_steps(a.k), num_tiles = (a.num_tokens + kTokens - 1) / kTokens;
  const bool at_once = num_tiles <= kPair;  // then each weight is widened shortly before it is used, and once
  const int64_t chunk = at_once ? std::min<int64_t>(kFewSteps, steps) : steps;
  const BFloat16* weights[2] = {scratch, scratch + chunk * 2 * kTile};
  const auto widen_chunk = [&](int64_t first, int64_t last) {
    for (int g = 0; g < groups; g++) widen_group(a, tables, group + g, first, last, scratch + g * chunk * 2 * kTile);
  };
  if (!at_once) widen_chunk(0, steps);
  for (int64_t tile = 0; tile < num_tiles; tile += kPair) {
    const bool pair = tile + 1 < num_tiles;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t first = 0; first < steps; first += chunk) {
      const int64_t last = std::min(first + chunk, steps);
      if (at_once) widen_chunk(first, last);
      const BFloat16* from = x + (tile * steps + first) * 2 * kTile;
      const BFloat16* tokens[2] = {from, from + steps * 2 * kTile};
      if (pair)
        accumulate<groups, 2>(weights, tokens, (last - first) * 2);
      else
        accumulate<groups, 1>(weights, tokens, (last - first) * 2);
    }
    finish<0>(a, group, tile);
    if (pair) finish<1>(a, group, tile + 1);
    if constexpr (groups > 1) {
      finish<2>(a, group + 1, tile);
      if (pair) finish<3>(a, group + 1, tile + 1);
    }
  }
}

}  // namespace tiles
#endif
}  // namespace lamina::bf16
#endif
