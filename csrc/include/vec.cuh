// Neighbouring elements moved by one instruction, converted to float and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace lamina {

constexpr int kVecBytes = 16;

template <typename T>
constexpr int kVecWidth = kVecBytes / static_cast<int>(sizeof(T));

namespace detail {

template <size_t kBytes>
struct Raw;
template <>
struct Raw<2> {
  using Type = uint16_t;
};
template <>
struct Raw<4> {
  using Type = uint32_t;
};
template <>
struct Raw<16> {
  using Type = uint4;
};

}  // namespace detail

// kWidth neighbours as they lie in memory; aligned to their own size, so that they move at once.
template <typename T, int kWidth>
struct Vec {
  union {
    typename detail::Raw<sizeof(T) * kWidth>::Type raw;
    T elements[kWidth];
  };
  __device__ Vec() {}
};

template <int kWidth, typename T>
__device__ __forceinline__ Vec<T, kWidth> load(const T* from) {
  Vec<T, kWidth> vec;
  vec.raw = *reinterpret_cast<const decltype(vec.raw)*>(from);
  return vec;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vec<T, kWidth>& vec) {
  // by name: left to itself, the compiler takes a vector that was made in pieces apart again
  __stwb(reinterpret_cast<std::remove_const_t<decltype(vec.raw)>*>(to), vec.raw);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// Rounds to the nearest, ties to even, as torch does.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return to_float(from_float<T>(x));
}

// Whether every pointer and every stride (in elements) lets a vector of the full width be moved at once.
template <typename... Pointers>
inline bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kVecBytes == 0) && ...);
}

template <typename T, typename... Counts>
inline bool whole_vecs(Counts... counts) {
  return ((static_cast<int64_t>(counts) % kVecWidth<T> == 0) && ...);
}

}  // namespace lamina
