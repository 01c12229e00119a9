// Float vectors of the machine's width through compiler vector extensions: one source for AVX-512, AVX2, NEON, SSE.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace lamina {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};
#if !defined(__F16C__)
typedef _Float16 Float16Vec __attribute__((vector_size(kLanes * 2)));
#endif

constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline Vec broadcast(float x) { return x - Vec{}; }  // not +, which would have to turn -0 into 0

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Vec load(const BFloat16* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
  HalfBits bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bit_cast<Vec>(__builtin_convertvector(bits, BitVec) << 16);
#endif
}

// The first `count` bytes in a lane each, then zeros; nothing beyond them is read.
inline IntVec load_bytes(const uint8_t* from, int64_t count = kLanes) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes = {};
  if (count >= kLanes)
    std::memcpy(&bytes, from, kLanes);
  else
    std::memcpy(&bytes, from, count);
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes)));
#else
  return __builtin_convertvector(bytes, IntVec);
#endif
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline void store(BFloat16* to, Vec x) {
#if defined(__AVX512BF16__)
  __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
#else
  BitVec bits = bit_cast<BitVec>(x);
  BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  HalfBits narrow = __builtin_convertvector(x == x ? rounded : BitVec{} + 0x7fc0, HalfBits);
#endif
  std::memcpy(to, &narrow, sizeof(narrow));
}

inline Vec load(const Float16* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Float16Vec x;
  std::memcpy(&x, from, sizeof(x));
  return __builtin_convertvector(x, Vec);
#endif
}

inline void store(Float16* to, Vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  Float16Vec narrow = __builtin_convertvector(x, Float16Vec);
  std::memcpy(to, &narrow, sizeof(narrow));
#endif
}

// The first `count` elements, then zeros; nothing beyond them is read.
template <typename T>
inline Vec load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

// Elements 2l and 2l + 1 are in lane l of one vector, as they lie in memory; split turns them into two of floats.
template <typename Half>
inline Vec load_pairs(const Half* from, int64_t count) {
  static_assert(sizeof(Half) == 2, "two elements a lane");
  Vec pairs = {};
  std::memcpy(&pairs, from, (count >= 2 * kLanes ? 2 * kLanes : count) * sizeof(Half));
  return pairs;
}

inline void split(const BFloat16*, Vec pairs, Vec& even, Vec& odd) {
  even = bit_cast<Vec>(bit_cast<BitVec>(pairs) << 16);
  odd = bit_cast<Vec>(bit_cast<BitVec>(pairs) & 0xffff0000u);
}

inline void split(const Float16*, Vec pairs, Vec& even, Vec& odd) {
  BitVec bits = bit_cast<BitVec>(pairs);
  HalfBits low = __builtin_convertvector(bits, HalfBits), high = __builtin_convertvector(bits >> 16, HalfBits);
  even = load(reinterpret_cast<const Float16*>(&low));
  odd = load(reinterpret_cast<const Float16*>(&high));
}

// Lane l of the result is lane indices[l] of the concatenation (a, b).
template <int... indices>
inline Vec shuffle(Vec a, Vec b, std::integer_sequence<int, indices...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, indices...);
#else
  return __builtin_shuffle(a, b, IntVec{indices...});
#endif
}

namespace detail {

using Lanes = std::make_integer_sequence<int, kLanes>;

// Lane `first` + l / 2 of a for even l, of b for odd l, as an index into (a, b).
template <int first, int... lane>
constexpr auto joined_indices(std::integer_sequence<int, lane...>) {
  return std::integer_sequence<int, (first + lane / 2 + (lane % 2) * kLanes)...>();
}

}  // namespace detail

// What split took apart.
template <typename T>
inline void store_joined(T* to, Vec even, Vec odd) {
  store(to, shuffle(even, odd, detail::joined_indices<0>(detail::Lanes())));
  store(to + kLanes, shuffle(even, odd, detail::joined_indices<kLanes / 2>(detail::Lanes())));
}

template <typename T>
inline void store_some(T* to, Vec x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline IntVec lane_ids() {
  IntVec ids = {};
  for (int i = 0; i < kLanes; i++) ids[i] = i;
  return ids;
}

namespace detail {

// Lane l with bit `half` flipped, as an index into (a, b): the partner's lane, taken from b where `half` is set.
template <int half, bool high, int... lane>
constexpr auto swap_indices(std::integer_sequence<int, lane...>) {
  return std::integer_sequence<int, (high ? (lane & half ? kLanes + lane : lane + half)
                                          : (lane & half ? kLanes + lane - half : lane))...>();
}

template <int half>
inline void transpose_step(Vec* rows) {
  for (int i = 0; i < kLanes; i++) {
    if (i & half) continue;
    Vec low = shuffle(rows[i], rows[i + half], swap_indices<half, false>(Lanes()));
    Vec high = shuffle(rows[i], rows[i + half], swap_indices<half, true>(Lanes()));
    rows[i] = low;
    rows[i + half] = high;
  }
}

// Of `2 * half` vectors the first half: lanes without bit `half` add up those of rows[i], lanes with it rows[i +
// half]'s.
template <int half, typename Combine>
inline void combine_step(Vec* rows, Combine combine) {
  for (int i = 0; i < half; i++)
    rows[i] = combine(shuffle(rows[i], rows[i + half], swap_indices<half, false>(Lanes())),
                      shuffle(rows[i], rows[i + half], swap_indices<half, true>(Lanes())));
}

template <int half>
inline Vec rotate(Vec x) {
  return shuffle(x, x, swap_indices<half, true>(Lanes()));
}

}  // namespace detail

// In place: lane l of row r becomes lane r of row l.
inline void transpose(Vec* rows) {
#if defined(__AVX512F__)
  detail::transpose_step<8>(rows);
#endif
#if defined(__AVX__)
  detail::transpose_step<4>(rows);
#endif
  detail::transpose_step<2>(rows);
  detail::transpose_step<1>(rows);
}

// Lane r of the result is what `reduce` makes of rows[r]; the rows are used up.
template <typename Combine>
inline Vec reduce_rows(Vec* rows, Combine combine) {
#if defined(__AVX512F__)
  detail::combine_step<8>(rows, combine);
#endif
#if defined(__AVX__)
  detail::combine_step<4>(rows, combine);
#endif
  detail::combine_step<2>(rows, combine);
  detail::combine_step<1>(rows, combine);
  return rows[0];
}

inline Vec sum_rows(Vec* rows) {
  return reduce_rows(rows, [](Vec a, Vec b) { return a + b; });
}

// Lane-wise `combine` over all lanes by a fixed tree; the result is in every lane that matters, the first.
template <typename Combine>
inline float reduce(Vec x, Combine combine) {
#if defined(__AVX512F__)
  x = combine(x, detail::rotate<8>(x));
#endif
#if defined(__AVX__)
  x = combine(x, detail::rotate<4>(x));
#endif
  x = combine(x, detail::rotate<2>(x));
  x = combine(x, detail::rotate<1>(x));
  return x[0];
}

// 2^x within 1 ulp for -126 <= x <= 127, exactly 1 at 0, exactly 0 below -126; a NaN stays a NaN.
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - whole;
#else
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  Vec clamped = x < -127.0f ? broadcast(-127.0f) : x;
  Vec shifted = clamped + kRound;
  Vec f = clamped - (shifted - kRound);
#endif
  Vec p = broadcast(1.5355398e-4f);
  p = p * f + 1.3398833e-3f;
  p = p * f + 9.618430e-3f;
  p = p * f + 5.5503327e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)whole);
#else
  Vec scaled = bit_cast<Vec>(bit_cast<BitVec>(p) + (bit_cast<BitVec>(shifted) << 23));
  return x < -126.0f ? Vec{} : scaled;
#endif
}

// e^x within 2 ulp for -87 <= x <= 88, 0 below, infinity above; a NaN stays a NaN.
inline Vec exp(Vec x) {
  const float kRound = 12582912.0f, kLog2E = 1.44269504f;
  const float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // an integer times the high part is exact
  Vec n = (x * kLog2E + kRound) - kRound;
  Vec scaled = exp2(n) * exp2(((x - n * kLn2High) - n * kLn2Low) * kLog2E);
  return x > 88.0f ? broadcast(kInfinity) : (x < -87.0f ? Vec{} : scaled);
}

// tanh by its series near 0, where 1 - 2 / (e^2x + 1) would cancel.
inline Vec tanh(Vec x) {
  Vec bounded = x < -10.0f ? broadcast(-10.0f) : (x > 10.0f ? broadcast(10.0f) : x);
  Vec far = 1.0f - 2.0f / (exp2(bounded * (2.0f * kLog2E)) + 1.0f);
  Vec s = x * x;
  Vec p = broadcast(-8.8632355e-3f);
  p = p * s + 2.1869488e-2f;
  p = p * s - 5.3968254e-2f;
  p = p * s + 1.3333333e-1f;
  p = p * s - 3.3333333e-1f;
  Vec near = x + x * s * p;
  return (s < 0.09000001f) ? near : far;  // which is no square of a float
}

}  // namespace lamina
