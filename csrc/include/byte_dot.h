// Products of unsigned by signed bytes, those of four neighbours summed into a lane: exact, by whatever the CPU has.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace lamina {

typedef uint8_t ByteVec __attribute__((vector_size(kLanes * 4)));

inline ByteVec load_byte_vec(const uint8_t* from) {
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// The four bytes at `from` in every lane.
inline IntVec broadcast_four(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return four - IntVec{};
}

// sums[l] + weights[4l .. 4l + 3] @ x[4l .. 4l + 3], x from -127 to 127, of `is_wide` from -128: weights
// may be above 127 then.
template <bool is_wide>
inline IntVec add_dots(IntVec sums, ByteVec weights, IntVec x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i ones = _mm512_set1_epi16(1), high = _mm512_set1_epi8(-128);
  const __m512i low = is_wide ? _mm512_andnot_si512(high, (__m512i)weights) : (__m512i)weights;
  sums += (IntVec)_mm512_madd_epi16(_mm512_maddubs_epi16(low, (__m512i)x), ones);
  if (is_wide) {  // a sum of two whole products would not fit into 16 bits
    const __m512i top = _mm512_and_si512(high, (__m512i)weights);
    sums += (IntVec)_mm512_madd_epi16(_mm512_maddubs_epi16(top, (__m512i)x), ones);
  }
  return sums;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i ones = _mm256_set1_epi16(1), high = _mm256_set1_epi8(-128);
  const __m256i low = is_wide ? _mm256_andnot_si256(high, (__m256i)weights) : (__m256i)weights;
  sums += (IntVec)_mm256_madd_epi16(_mm256_maddubs_epi16(low, (__m256i)x), ones);
  if (is_wide) {  // a sum of two whole products would not fit into 16 bits
    const __m256i top = _mm256_and_si256(high, (__m256i)weights);
    sums += (IntVec)_mm256_madd_epi16(_mm256_maddubs_epi16(top, (__m256i)x), ones);
  }
  return sums;
#elif defined(__ARM_FEATURE_DOTPROD)
  const int32x4_t first = bit_cast<int32x4_t>(sums);
  const int8x16_t bytes = bit_cast<int8x16_t>(x);
  if (!is_wide) return bit_cast<IntVec>(vdotq_s32(first, bit_cast<int8x16_t>(weights), bytes));
  const ByteVec low = weights & 127, top = weights >> 7;
  const int32x4_t rest = vdotq_s32(vdupq_n_s32(0), bit_cast<int8x16_t>(top), bytes);
  return bit_cast<IntVec>(vaddq_s32(vdotq_s32(first, bit_cast<int8x16_t>(low), bytes), vshlq_n_s32(rest, 7)));
#else
  typedef int8_t Signed __attribute__((vector_size(kLanes * 4)));
  const Signed bytes = (Signed)x;
  for (int l = 0; l < kLanes; l++)
    for (int i = 4 * l; i < 4 * l + 4; i++) sums[l] += weights[i] * bytes[i];
  return sums;
#endif
}

}  // namespace lamina
