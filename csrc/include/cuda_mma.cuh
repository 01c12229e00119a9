// Warp-wide instructions of sm_80 and later: cp.async, ldmatrix, movmatrix, mma.sync.
//
// A lane is 4 * row + pair. Of an 8x8 matrix of 16-bit elements it holds elements 2 * pair and 2 * pair + 1 of its row,
// in one register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "float_ops.cuh"

namespace lamina {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The pointer, of which the compiler loses what it knows. Where it knows that shared memory begins at a uniform
// register, ptxas of CUDA 13.0 folds that into cp.async, to an instruction that GPUs refuse as illegal.
template <typename T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// cp.async: starts to copy 16 bytes to shared memory, or to put 16 zero bytes there; `from` must be valid either way.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool copied, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(copied ? 16 : 0), "l"(policy)
               : "memory");
}

// The same, or nothing at all: without a branch, of which there would be one a copy.
__device__ __forceinline__ void copy_async_unless(bool is_left_out, void* to, const void* from, bool copied,
                                                  uint64_t policy) {
  asm volatile(
      "{\n"
      ".reg .pred is_started;\n"
      "setp.eq.u32 is_started, %4, 0;\n"
      "@is_started cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n"
      "}\n" ::"r"(shared_address(to)),
      "l"(from), "r"(copied ? 16 : 0), "l"(policy), "r"(static_cast<uint32_t>(is_left_out))
      : "memory");
}

// Ends a group of cp.async copies; groups finish in order.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are unfinished.
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// ldmatrix.x4: four 8x8 matrices, of which lane 8 * m + r gives the address of row r of matrix m.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  load_matrices(to, shared_address(row));
}

__device__ __forceinline__ void load_transposed_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(matrix));
  return result;
}

// mma.m16n8k16: sum[16x8] += left[16x16] * right[16x8]. Of `sum`, a lane holds two neighbours of its row, then of row
// + 8.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2],
                                             __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2],
                                             __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// Two floats rounded to one register, the first in its low half.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(packed);
}

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 packed = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(packed);
}

}  // namespace lamina
