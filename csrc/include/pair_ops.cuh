// Arithmetic on two 16-bit floats in one register, and on the bits of registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lamina {

// (bits & mask) | base by one instruction, which two constants keep the compiler from.
__device__ __forceinline__ uint32_t masked_or(uint32_t bits, uint32_t mask, uint32_t base) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(base));
  return result;
}

// One half of a register in both. Written so, ptxas makes it a part of the arithmetic below, not an instruction.
__device__ __forceinline__ uint32_t both_low(uint32_t pair) {
  uint32_t both;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(both) : "r"(pair));
  return both;
}
__device__ __forceinline__ uint32_t both_high(uint32_t pair) {
  uint32_t both;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(both) : "r"(pair));
  return both;
}

// x - y, and x * y + z rounded once, of both halves.
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t x, uint32_t y, __nv_bfloat16) {
  uint32_t result;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t x, uint32_t y, __half) {
  uint32_t result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t x, uint32_t y, uint32_t z, __nv_bfloat16) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t x, uint32_t y, uint32_t z, __half) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

}  // namespace lamina
