// How a vector of weights is multiplied by one of activations, by the types of both.
#pragma once

#include <cstdint>
#include <cstring>

#include "int8.h"
#include "vector.h"

namespace lamina {

// How `DotKernel` multiplies a vector of weights of type W by x of type T: as floats, or in pairs where the CPU
// multiplies those.
template <typename T, typename W>
struct LaneOps {
  using Packed = float;
  static constexpr int kStep = kLanes;
  static void pack(const T* from, int64_t count, float* to) { store(to, load_some(from, count)); }
  static Vec multiply_add(Vec sum, const W* weight, const float* x) { return sum + load(weight) * load(x); }
};

#if defined(__AVX512BF16__)
template <>
struct LaneOps<BFloat16, BFloat16> {
  using Packed = BFloat16;
  static constexpr int kStep = 2 * kLanes;
  static void pack(const BFloat16* from, int64_t count, BFloat16* to) {
    Vec pairs = load_pairs(from, count);
    std::memcpy(to, &pairs, sizeof(pairs));
  }
  static Vec multiply_add(Vec sum, const BFloat16* weight, const BFloat16* x) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(weight));
  }
};
#endif

#if defined(LAMINA_INT8_AS_BF16)
template <>
struct LaneOps<BFloat16, int8_t> {
  using Packed = BFloat16;
  static constexpr int kStep = kBytes;
  static void pack(const BFloat16* from, int64_t count, BFloat16* to) {
    Vec halves[2];
    load_widened(from, count, halves[0], halves[1]);
    std::memcpy(to, halves, sizeof(halves));
  }
  static Vec multiply_add(Vec sum, const int8_t* weight, const BFloat16* x) {
    __m512i first, second;
    widen(_mm512_loadu_si512(weight), first, second);
    __m512 total = _mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)first);
    return (Vec)_mm512_dpbf16_ps(total, (__m512bh)_mm512_loadu_si512(x + kBytes / 2), (__m512bh)second);
  }
};
#endif

}  // namespace lamina
