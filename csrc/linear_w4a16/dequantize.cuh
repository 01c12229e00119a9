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

}  // namespace lamina
