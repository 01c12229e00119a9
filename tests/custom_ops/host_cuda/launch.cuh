// In place of csrc/include/launch.cuh: what kernels without warp instructions need to run on a host as plain C++.
//
// A block's threads are fibers that take turns at __syncthreads; atomics are plain, as nothing runs at once.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx;

namespace host {

constexpr size_t kStack = 1 << 16, kShared = 1 << 17;

struct Fiber {
  ucontext_t context{};
  std::vector<char> stack = std::vector<char>(kStack);
  bool is_done = false;
};
inline std::vector<Fiber> fibers;
inline ucontext_t home;
inline std::function<void()> body;

inline void yield() {
  const Index own = threadIdx;
  swapcontext(&fibers[own.x].context, &home);
  threadIdx = own;
}

inline void run_fiber() {
  body();
  fibers[threadIdx.x].is_done = true;
}

inline void run_block(unsigned threads) {
  fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &home;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (bool is_alive = true; is_alive;) {
    is_alive = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].is_done) continue;
      is_alive = true;
      threadIdx = {i, 0, 0};
      swapcontext(&home, &fibers[i].context);
    }
  }
}

// Runs function() as every thread of every block, over shared memory that holds anything at first.
inline void launch(unsigned columns, unsigned rows, unsigned threads, char* shared, std::function<void()> function) {
  body = std::move(function);
  for (unsigned y = 0; y < rows; ++y) {
    for (unsigned x = 0; x < columns; ++x) {
      std::memset(shared, 0xa5, kShared);
      blockIdx = {x, y, 0};
      run_block(threads);
    }
  }
}

}  // namespace host

inline void __syncthreads() { host::yield(); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(std::llrint(x)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}

template <typename T>
T atomicOr(T* to, T value) {
  const T before = *to;
  *to |= value;
  return before;
}

using std::fmax;
using std::fmaxf;
using std::fminf;

using cudaStream_t = void*;

namespace lamina {
inline int narrow(int64_t x) { return static_cast<int>(x); }
}  // namespace lamina
