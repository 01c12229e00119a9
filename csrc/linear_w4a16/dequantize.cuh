// Weights of four or eight bits to two of 16 bits a register, rounded once: (q - 8) * scale + zero of four bits,
// q * scale + zero of eight.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pair_ops.cuh"

namespace lamina {

// kNumberBase or'ed with four bits q in the lowest bits of a half is a number + q exactly, 128 in bfloat16, 1024 in
// float16; kNibbleOffset is that number + 8.
template <typename T>
constexpr uint32_t kNumberBase = std::is_same_v<T, __half> ? 0x64006400 : 0x43004300;
template <typename T>
constexpr uint32_t kNibbleOffset = std::is_same_v<T, __half> ? 0x64086408 : 0x43084308;

// Scale and zero point of a lane's two rows, each in both halves of a register.
struct RowScales {
  uint32_t scale[2], zero[2];
};

// The whole numbers of register i that a lane gives to WGMMA, of the words that layout.py makes of four such: one of
// numbers of four bits, two of bytes. Of a byte the lower seven bits are added to kNumberBase, its sign to what is
// subtracted: 128 more where it is set. Each difference is exact.
template <int kBits, typename T>
__device__ __forceinline__ uint32_t whole_numbers(const uint32_t* words, int i) {
  if constexpr (kBits == 4) {
    return subtract_pairs(masked_or(words[0] >> 4 * i, 0x000f000f, kNumberBase<T>), kNibbleOffset<T>, T{});
  } else {
    const uint32_t word = words[i / 2] >> 8 * (i % 2);
    return subtract_pairs(masked_or(word, 0x007f007f, kNumberBase<T>), masked_or(word, 0x00800080, kNumberBase<T>),
                          T{});
  }
}

// All four registers of a step of 16 columns.
template <int kBits, typename T>
__device__ __forceinline__ void dequantize(uint32_t* to, const uint32_t* words, const RowScales& rows) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    to[i] = multiply_add_pairs(whole_numbers<kBits, T>(words, i), rows.scale[i % 2], rows.zero[i % 2], T{});
}

// The same of four bits without zero points, by one multiply-add for two weights in bfloat16. There the bits of a whole
// number q from 0 to 255 are those of q * 2^-133: numbers of the least exponent lie as far apart as subnormal ones. So
// bits that lie lowest are q * 2^-133 as they are, the four above q * 2^-129, and with a scale that makes up for it
// q * scale - 8 * scale is rounded once, as (q - 8) * scale is. Weights are made kPlainFactor times too small, and sums
// multiplied by it: what makes up for 2^-133 would not be finite else. That is exact for scales below 2^27 and weights
// from 2^-94 on.
template <typename T>
constexpr bool kIsFolded = !std::is_same_v<T, __half>;
template <typename T>
constexpr float kPlainFactor = kIsFolded<T> ? 4294967296.0f : 1.0f;
constexpr uint32_t kLift = 0x70007200, kMinusEight = 0xb100b100;  // 2^101 and above it 2^97, -2^-29 twice

// What that takes of the scales of a lane's two rows, of which the first has the lower bits of a byte.
template <typename T>
__device__ __forceinline__ RowScales find_plain_scales(uint32_t scales) {
  if constexpr (kIsFolded<T>) {
    const uint32_t lifted = multiply_add_pairs(scales, kLift, 0, T{});
    const uint32_t eights = multiply_add_pairs(scales, kMinusEight, 0, T{});
    return {{both_low(lifted), both_high(lifted)}, {both_low(eights), both_high(eights)}};
  }
  return {{both_low(scales), both_high(scales)}, {}};
}

template <typename T>
__device__ __forceinline__ void dequantize_plain(uint32_t* to, uint32_t word, const RowScales& rows) {
  if constexpr (kIsFolded<T>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t numbers = (i < 2 ? word : word >> 8) & (i % 2 == 0 ? 0x000f000f : 0x00f000f0);
      to[i] = multiply_add_pairs(numbers, rows.scale[i % 2], rows.zero[i % 2], T{});
    }
  } else {
    dequantize<4, T>(to, &word, rows);
  }
}

}  // namespace lamina
