// Four-bit weights to two of 16 bits a register: (q - 8) * scale + zero, rounded once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pair_ops.cuh"

namespace lamina {

// kNibbleBase or'ed with four bits q in the lowest bits of a half is a number + q exactly, 128 in bfloat16, 1024 in
// float16; kNibbleOffset is that number + 8.
template <typename T>
constexpr uint32_t kNibbleBase = std::is_same_v<T, __half> ? 0x64006400 : 0x43004300;
template <typename T>
constexpr uint32_t kNibbleOffset = std::is_same_v<T, __half> ? 0x64086408 : 0x43084308;

// Scale and zero point of a lane's two rows, each in both halves of a register.
struct RowScales {
  uint32_t scale[2], zero[2];
};

// The four registers that a lane gives to WGMMA, of the word that layout.py makes of them.
template <typename T>
__device__ __forceinline__ void dequantize(uint32_t* to, uint32_t word, const RowScales& rows) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t based = masked_or(word >> 4 * i, 0x000f000f, kNibbleBase<T>);
    const uint32_t whole = subtract_pairs(based, kNibbleOffset<T>, T{});
    to[i] = multiply_add_pairs(whole, rows.scale[i % 2], rows.zero[i % 2], T{});
  }
}

}  // namespace lamina
