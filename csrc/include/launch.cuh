// What every CUDA launcher shares: dtype codes, grid arithmetic, the error as a number and as text.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace lamina {

// Calls function with a value of the type that the code stands for; custom_ops/_shared/cuda_kernel.py has the same
// codes.
template <typename Function>
inline int with_dtype(int64_t code, const Function& function) {
  switch (code) {
    case 0:
      return function(float{});
    case 1:
      return function(__nv_bfloat16{});
    case 2:
      return function(__half{});
    default:
      return cudaErrorInvalidValue;
  }
}

// The same for types of 16 bits alone.
template <typename Function>
inline int with_narrow_dtype(int64_t code, const Function& function) {
  if (code == 1) return function(__nv_bfloat16{});
  if (code == 2) return function(__half{});
  return cudaErrorInvalidValue;
}

// Calls function with a value of the widest type in which the data can be moved: 16 bytes where every pointer and
// every one of the sizes or'ed together allows it, else one element.
template <typename Function, typename... Pointers>
inline int with_unit(int64_t element_size, int64_t sizes, const Function& function, const Pointers*... pointers) {
  if (((sizes | ... | reinterpret_cast<int64_t>(pointers)) % 16) == 0) return function(uint4{});
  switch (element_size) {
    case 1:
      return function(uint8_t{});
    case 2:
      return function(uint16_t{});
    case 4:
      return function(uint32_t{});
    case 8:
      return function(uint64_t{});
    default:
      return cudaErrorInvalidValue;
  }
}

inline int narrow(int64_t x) { return static_cast<int>(x); }

inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline int launch_error() { return static_cast<int>(cudaGetLastError()); }

// Threads of a block as columns of a head times heads: each thread keeps its column from head to head, and the
// passes over the heads are equally full.
inline dim3 heads_block(int64_t columns, int64_t heads, int64_t max_threads) {
  const int64_t x = smaller(columns, max_threads);
  const int64_t passes = ceil_div(heads, max_threads / x);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(ceil_div(heads, passes)));
}

}  // namespace lamina

extern "C" const char* lamina_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
