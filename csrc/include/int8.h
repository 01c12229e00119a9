// int8 weights, -127 to 127, widened to bfloat16, which holds them exactly, for AMX and AVX-512 BF16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define LAMINA_INT8_AS_BF16 1

namespace lamina {

constexpr int kBytes = 64;  // in a register

// The lower or the upper byte of the bfloat16 of 0 to 127.
struct alignas(64) ByteTable {
  uint8_t bytes[128] = {};

  explicit constexpr ByteTable(int shift) {
    for (int value = 1; value < 128; value++) {
      int exponent = 0;
      while (value >> (exponent + 1) != 0) exponent++;
      const int mantissa = (value << (7 - exponent)) & 0x7f;
      bytes[value] = static_cast<uint8_t>((((127 + exponent) << 7) | mantissa) >> shift);
    }
  }
};

inline constexpr ByteTable kLower(0), kUpper(8);

inline __m512i look_up(const ByteTable& table, __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table.bytes), index, _mm512_load_si512(table.bytes + 64));
}

// 64 weights as two registers: the lower halves of each 16 bytes, then the upper ones.
inline void widen(__m512i bytes, __m512i& first, __m512i& second) {
  const __m512i size = _mm512_abs_epi8(bytes);
  const __m512i sign_or = _mm512_set1_epi8(-128);
  const __m512i low = look_up(kLower, size);
  const __m512i high = _mm512_ternarylogic_epi32(look_up(kUpper, size), bytes, sign_or, 0xf8);  // a | (b & c)
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

inline __m512i load_bytes(const int8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi8(count >= kBytes ? ~0ull : (1ull << count) - 1, from);
}

// 64 elements of x in the order of `widen`, zeros beyond `count`.
inline void load_widened(const BFloat16* from, int64_t count, Vec& first, Vec& second) {
  const __m512i a = (__m512i)load_pairs(from, count);
  const __m512i b = count > 2 * kLanes ? (__m512i)load_pairs(from + 2 * kLanes, count - 2 * kLanes) : __m512i{};
  first = (Vec)_mm512_shuffle_i64x2(a, b, 0x88);
  second = (Vec)_mm512_shuffle_i64x2(a, b, 0xdd);
}

}  // namespace lamina
#endif
