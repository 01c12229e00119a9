// In place of csrc/include/launch.cuh: what kernels need to run on a host as plain C++.
//
// A block's threads are fibers that take turns where they wait for each other; atomics are plain, as nothing runs at
// once.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "fiber.cuh"

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx;
struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace host {

constexpr size_t kWarp = 32, kPage = 1 << 12, kRoom = 1 << 18;

struct Fiber {
  Turns turns;
  bool is_done = false;
  unsigned num_shared = 0;  // times that it gave its warp a value
};
struct Warp {
  std::array<uint64_t, kWarp> given[2];  // in turn: some lanes may be one time ahead
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline unsigned num_synced, sync_round;
inline std::function<void()> body;

inline void yield() {
  const Index own = threadIdx;
  fibers[own.x].turns.yield();
  threadIdx = own;
}

inline void sync() {
  const unsigned round = sync_round;
  if (++num_synced == fibers.size()) {
    num_synced = 0, ++sync_round;
  } else {
    while (sync_round == round) yield();
  }
}

// What every lane of the warp gives; lanes go on in turn, so that after one yield all have given.
template <typename Value>
const std::array<uint64_t, kWarp>& share(const Value& value) {
  auto& given = warps[threadIdx.x / kWarp].given[fibers[threadIdx.x].num_shared++ % 2];
  std::memcpy(&given[threadIdx.x % kWarp], &value, sizeof(Value));
  yield();
  return given;
}

template <typename Value>
Value from_lane(const Value& value, unsigned lane) {
  Value result;
  std::memcpy(&result, &share(value)[lane % kWarp], sizeof(Value));
  return result;
}

template <typename Function>
uint32_t reduced(uint32_t value, const Function& function) {
  const auto given = share(value);
  uint32_t result = static_cast<uint32_t>(given[0]);
  for (size_t lane = 1; lane < kWarp; ++lane) result = function(result, static_cast<uint32_t>(given[lane]));
  return result;
}

inline void run_fiber() {
  body();
  fibers[threadIdx.x].is_done = true;
  Turns::leave();
}

inline void run_block(unsigned threads) {
  fibers.resize(threads), warps.resize(threads / kWarp), num_synced = 0;
  for (Fiber& fiber : fibers) fiber.is_done = false, fiber.num_shared = 0, fiber.turns.begin(run_fiber);
  for (bool is_alive = true; is_alive;) {
    is_alive = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].is_done) continue;
      is_alive = true;
      threadIdx = {i, 0, 0};
      fibers[i].turns.go_on();
    }
  }
}

// The part of an array of kRoom bytes that is a block's shared memory: nobody may touch the pages behind it, nor change
// what of its last page is not its own.
class Shared {
 public:
  template <typename T>
  Shared(T* array, size_t size) : begin_(reinterpret_cast<char*>(array)), size_(size) {
    protect(PROT_NONE);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { protect(PROT_READ | PROT_WRITE); }
  void fill(int byte) const {
    std::memset(begin_, 0xff, end());
    std::memset(begin_, byte, size_);
  }
  void check() const {
    for (size_t i = size_; i < end(); ++i)
      if (begin_[i] != '\xff') std::abort();
  }

 private:
  size_t end() const { return (size_ + kPage - 1) / kPage * kPage; }
  void protect(int how) const { mprotect(begin_ + end(), kRoom - end(), how); }
  char* begin_;
  size_t size_;
};

// Runs function() as every thread of every block, over shared memory that holds anything at first.
inline void launch(unsigned columns, unsigned rows, unsigned threads, const Shared& shared,
                   std::function<void()> function) {
  body = std::move(function);
  for (unsigned y = 0; y < rows; ++y) {
    for (unsigned x = 0; x < columns; ++x) {
      shared.fill(x + y == 0 ? 0xff : 0);  // no number, as floats; later what looks like one
      blockIdx = {x, y, 0};
      run_block(threads);
      shared.check();
    }
  }
}

}  // namespace host

inline void __syncthreads() { host::sync(); }
template <typename Value>
Value __shfl_sync(unsigned, const Value& value, int lane) {
  return host::from_lane(value, static_cast<unsigned>(lane));
}
template <typename Value>
Value __shfl_xor_sync(unsigned, const Value& value, int bits) {
  return host::from_lane(value, threadIdx.x ^ static_cast<unsigned>(bits));
}
template <typename Value>
Value __shfl_up_sync(unsigned, const Value& value, int distance) {
  const unsigned lane = threadIdx.x % host::kWarp, offset = static_cast<unsigned>(distance);
  return host::from_lane(value, lane < offset ? lane : lane - offset);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const unsigned lane = threadIdx.x % host::kWarp;
  return host::reduced(static_cast<uint32_t>(value) << lane, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  return host::reduced(value, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return host::reduced(value, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return host::reduced(value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(int64_t x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __log2f(float x) { return std::log2(x); }
inline uint32_t __float2uint_rn(float x) { return static_cast<uint32_t>(std::llrint(x)); }
inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(std::llrint(x)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
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

template <typename T>
T atomicMin(T* to, T value) {
  const T before = *to;
  *to = std::min(before, value);
  return before;
}

template <typename T>
T atomicMax(T* to, T value) {
  const T before = *to;
  *to = std::max(before, value);
  return before;
}

using std::fmax;
using std::fmaxf;
using std::fminf;
using std::max;
using std::min;

using cudaStream_t = void*;

namespace lamina {
inline int narrow(int64_t x) { return static_cast<int>(x); }
}  // namespace lamina
