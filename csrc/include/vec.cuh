// Neighbouring elements moved by one instruction, converted to float and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace lamina {

constexpr int kVecBytes = 16;

template <typename T>
constexpr int kVecWidth = kVecBytes / static_cast<int>(sizeof(T));

// kWidth neighbours as they lie in memory: the full 16 bytes, or one element.
template <typename T, int kWidth>
struct Vec {
  static_assert(sizeof(T) * kWidth == kVecBytes, "16 bytes or one element");
  uint4 raw;
};
template <typename T>
struct Vec<T, 1> {
  T raw;
};

template <int kWidth, typename T>
__device__ __forceinline__ Vec<T, kWidth> load(const T* from) {
  return {*reinterpret_cast<const decltype(Vec<T, kWidth>::raw)*>(from)};
}

// As they are in the L2 cache. The L1 cache may have them as they were before a kernel that has ended since this one
// began.
template <int kWidth, typename T>
__device__ __forceinline__ Vec<T, kWidth> load_from_l2(const T* from) {
  static_assert(kWidth > 1, "16 bytes");
  Vec<T, kWidth> vec;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vec.raw.x), "=r"(vec.raw.y), "=r"(vec.raw.z), "=r"(vec.raw.w)
               : "l"(from)
               : "memory");
  return vec;
}

__device__ __forceinline__ void store_raw(void* to, const uint4& raw) {
  // in PTX: left to itself, the compiler stores a vector that was made in pieces in pieces
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
               : "memory");
}

template <typename Raw>
__device__ __forceinline__ void store_raw(void* to, const Raw& raw) {
  *static_cast<Raw*>(to) = raw;
}

// To device memory.
template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vec<T, kWidth>& vec) {
  store_raw(to, vec.raw);
}

// The compiler loses what it knows of these values, so that it keeps the 16 bytes and not the floats made of them.
template <typename T, int kWidth>
__device__ __forceinline__ void keep_packed(Vec<T, kWidth>& vec) {
  asm volatile("" : "+r"(vec.raw.x), "+r"(vec.raw.y), "+r"(vec.raw.z), "+r"(vec.raw.w));
}

// Two at a time, which is what conversions of 16-bit types take. Rounding is to the nearest, ties to even, as torch's.
template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  __nv_bfloat162 both;
  __device__ __forceinline__ float2 unpack() const { return __bfloat1622float2(both); }
  __device__ __forceinline__ void pack(float x, float y) { both = __floats2bfloat162_rn(x, y); }
};
template <>
struct Pair<__half> {
  __half2 both;
  __device__ __forceinline__ float2 unpack() const { return __half22float2(both); }
  __device__ __forceinline__ void pack(float x, float y) { both = __floats2half2_rn(x, y); }
};
template <>
struct Pair<float> {  // the halves of 8 bytes are what they are
  float2 both;
  __device__ __forceinline__ float2 unpack() const { return both; }
  __device__ __forceinline__ void pack(float x, float y) { both = {x, y}; }
};

template <typename T, int kWidth>
__device__ __forceinline__ void to_floats(float (&to)[kWidth], const Vec<T, kWidth>& vec) {
  if constexpr (kWidth == 1) {
    to[0] = static_cast<float>(vec.raw);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float2 both = reinterpret_cast<const Pair<T>*>(&vec.raw)[i / 2].unpack();
      to[i] = both.x;
      to[i + 1] = both.y;
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> from_floats(const float (&from)[kWidth]) {
  Vec<T, kWidth> vec;
  if constexpr (kWidth == 1) {
    vec.raw = static_cast<T>(from[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) reinterpret_cast<Pair<T>*>(&vec.raw)[i / 2].pack(from[i], from[i + 1]);
  }
  return vec;
}

// The values that are left after a trip through T.
template <typename T, int kWidth>
__device__ __forceinline__ void round_to(float (&values)[kWidth]) {
  to_floats(values, from_floats<T>(values));
}

// Whether every pointer, and every count or stride in elements, allows vectors of the full width.
template <typename... Pointers>
inline bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kVecBytes == 0) && ...);
}

template <typename T, typename... Counts>
inline bool whole_vecs(Counts... counts) {
  return ((static_cast<int64_t>(counts) % kVecWidth<T> == 0) && ...);
}

}  // namespace lamina
