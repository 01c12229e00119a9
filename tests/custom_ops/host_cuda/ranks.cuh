// In place of launch.cuh, launch_ranks.cuh, pdl.cuh, system_scope.cuh and vec.cuh: GPUs of several ranks on a host.
//
// Threads are fibers, of which a seeded generator lets some go on and others wait. A rank begins its next kernel once
// the one before has ended, whatever the others do. What a block stores arrives later, in any order, but before what it
// releases then; of packets each half does, even when the kernel that sent them has ended.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "bf16.cuh"
#include "fiber.cuh"
#include "vec_values.cuh"

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static __attribute__((section("of_block")))
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
struct dim3 {
  explicit dim3(unsigned x) : x(x) {}
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;
using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1;

namespace host {

struct Vector {
  void* to;
  std::array<char, 16> bytes;
};
struct Half {  // of a packet
  uint64_t* to;
  uint64_t word;
};
struct Warp {
  std::array<uint64_t, 32> given{}, taken{};
  int num_given = 0, round = 0;
};
struct Block {
  unsigned num_synced = 0, round = 0;
  std::vector<Vector> stored;  // and not arrived
  std::vector<Warp> warps;
  std::vector<char> shared;  // while no fiber of it runs
};
struct Fiber {
  Turns turns;
  int rank;
  Index block, thread;
  bool is_done = false;
};
struct Kernel {
  std::function<void()> body;
  unsigned blocks, threads;
};
struct Gpu {
  std::deque<Kernel> kernels;  // of which the first runs
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Block> blocks;
};

inline std::deque<Gpu> gpus;
inline std::vector<Half> sent;  // and not arrived
inline Fiber* current;
inline std::mt19937 generator;

inline bool happens(unsigned times_of_16) { return generator() % 16 < times_of_16; }
inline Gpu& gpu() { return gpus[current->rank]; }
inline Block& block() { return gpu().blocks[current->block.x]; }

inline void yield() { current->turns.yield(); }

// What kernels declare as shared is one place for all blocks, into which each brings its own.
extern "C" {
extern char __start_of_block[] __attribute__((weak, visibility("hidden")));
extern char __stop_of_block[] __attribute__((weak, visibility("hidden")));
}
inline size_t num_shared() { return static_cast<size_t>(__stop_of_block - __start_of_block); }

template <typename Value>
Value from_lane(const Value& value, unsigned lane) {
  Warp& warp = block().warps[threadIdx.x / 32];
  const int round = warp.round;
  std::memcpy(&warp.given[threadIdx.x % 32], &value, sizeof(Value));
  if (++warp.num_given == 32) {
    warp.taken = warp.given, warp.num_given = 0, ++warp.round;
  } else {
    while (warp.round == round) yield();
  }
  Value result;
  std::memcpy(&result, &warp.taken[lane % 32], sizeof(Value));
  return result;
}

inline void arrive(Block& block, size_t which) {
  std::memcpy(block.stored[which].to, block.stored[which].bytes.data(), 16);
  std::swap(block.stored[which], block.stored.back());
  block.stored.pop_back();
}
inline void arrive_all(Block& block) {
  while (!block.stored.empty()) arrive(block, generator() % block.stored.size());
}

inline void arrive_some_sent() {
  if (sent.empty()) return;
  for (size_t count = generator() % (sent.size() / 4 + 2); count > 0 && !sent.empty(); --count) {
    Half& half = sent[generator() % sent.size()];
    *half.to = half.word;
    std::swap(half, sent.back());
    sent.pop_back();
  }
}

inline void run_fiber() {
  gpu().kernels.front().body();
  current->is_done = true;
  Turns::leave();
}

inline void begin(int rank) {
  Gpu& gpu = gpus[rank];
  gpu.fibers.clear(), gpu.blocks.clear();
  if (gpu.kernels.empty()) return;
  const Kernel& kernel = gpu.kernels.front();
  gpu.blocks.resize(kernel.blocks);
  for (Block& block : gpu.blocks) block.warps.resize((kernel.threads + 31) / 32), block.shared.resize(num_shared());
  for (unsigned i = 0; i < kernel.blocks * kernel.threads; ++i) {
    auto fiber = std::make_unique<Fiber>();
    fiber->rank = rank, fiber->block = {i / kernel.threads, 0, 0}, fiber->thread = {i % kernel.threads, 0, 0};
    fiber->turns.begin(run_fiber);
    gpu.fibers.push_back(std::move(fiber));
  }
}

// Whether any of a rank's fibers went on.
inline bool go_on(int rank) {
  Gpu& gpu = gpus[rank];
  if (gpu.kernels.empty()) return false;
  bool is_alive = false;
  for (const auto& fiber : gpu.fibers) {
    if (fiber->is_done) continue;
    is_alive = true;
    if (happens(6)) continue;
    current = fiber.get();
    threadIdx = fiber->thread, blockIdx = fiber->block;
    gridDim = {gpu.kernels.front().blocks, 1, 1}, blockDim = {gpu.kernels.front().threads, 1, 1};
    std::memcpy(__start_of_block, block().shared.data(), num_shared());
    fiber->turns.go_on();
    std::memcpy(block().shared.data(), __start_of_block, num_shared());
  }
  for (Block& block : gpu.blocks) {
    if (!block.stored.empty() && happens(8)) arrive(block, generator() % block.stored.size());
  }
  if (!is_alive) {
    for (Block& block : gpu.blocks) arrive_all(block);
    gpu.kernels.pop_front();
    begin(rank);
  }
  return true;
}

// Returns whether all kernels ended within so many rounds, with every packet received.
inline bool run(unsigned seed, int64_t rounds) {
  generator.seed(seed);
  sent.clear();
  const int num_ranks = static_cast<int>(gpus.size());
  for (int rank = 0; rank < num_ranks; ++rank) begin(rank);
  for (int64_t round = 0; round < rounds; ++round) {
    const unsigned slow = generator() % num_ranks;  // for a while, so that others get far ahead
    const int num_turns = happens(4) ? 64 : 8;
    bool is_any = false;
    for (int turn = 0; turn < num_turns; ++turn) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        const bool waits = rank == static_cast<int>(slow) && turn > 0;
        is_any = (waits ? !gpus[rank].kernels.empty() : go_on(rank)) || is_any;
        arrive_some_sent();
      }
    }
    if (!is_any) return sent.empty();
  }
  return false;
}

}  // namespace host

inline void __syncthreads() {
  const unsigned round = host::block().round;
  if (++host::block().num_synced == host::gpu().kernels.front().threads) {
    host::block().num_synced = 0, ++host::block().round;
  } else {
    while (host::block().round == round) host::yield();
  }
}

template <typename Value>
Value __shfl_xor_sync(unsigned, const Value& value, int bits) {
  return host::from_lane(value, threadIdx.x ^ static_cast<unsigned>(bits));
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline uint32_t atomicInc(uint32_t* to, uint32_t most) {
  const uint32_t before = *to;
  *to = before >= most ? 0 : before + 1;
  return before;
}

namespace lamina {

constexpr int kRankThreads = 8, kPacketThreads = 8, kVecBytes = 16;

inline void start_successor() {}
inline void wait_for_predecessor() {}
inline void follow_predecessor() {}

inline void store_release(uint32_t* to, uint32_t value) {
  host::arrive_all(host::block());
  *to = value;
}

inline uint32_t load_acquire(const uint32_t* from) {
  host::yield();
  return *from;
}

struct Packet {
  uint64_t words[2];
};

inline void store_packet(Packet* to, const Packet& packet) {
  for (int half = 0; half < 2; ++half) host::sent.push_back({&to->words[half], packet.words[half]});
}

inline Packet load_packet(const Packet* from) {
  if (host::happens(8)) host::yield();
  const uint64_t first = from->words[0];
  if (host::happens(2)) host::yield();
  return {first, from->words[1]};
}

template <typename Place>
Place* kept_address(Place* place) {
  return place;
}

template <int kWidth, typename T>
Vec<T, kWidth> load(const T* from) {
  if (host::happens(4)) host::yield();
  Vec<T, kWidth> vec;
  std::memcpy(&vec.raw, from, sizeof(vec));
  return vec;
}

template <typename T, int kWidth>
void store(T* to, const Vec<T, kWidth>& vec) {
  host::Vector stored{to, {}};
  std::memcpy(stored.bytes.data(), &vec.raw, sizeof(vec));
  host::block().stored.push_back(stored);
}

template <typename T, int kWidth>
void round_to(float (&values)[kWidth]) {
  to_floats(values, from_floats<T>(values));
}

template <typename T, int kWidth>
void keep_packed(Vec<T, kWidth>&) {}

template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <typename T, typename... Counts>
bool whole_vecs(Counts... counts) {
  return ((counts % kVecWidth<T> == 0) && ...);
}

inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int narrow(int64_t x) { return static_cast<int>(x); }

template <typename Function>
int with_dtype(int64_t code, const Function& function) {
  return code == 0 ? function(float{}) : function(Bf16{});
}

// Of one rank; it runs when host::run() is called.
template <typename Call>
int launch_ranks(void (*kernel)(Call), int64_t blocks, int64_t, int64_t threads, cudaStream_t, const Call& call) {
  host::gpus[call.ranks.first_rank].kernels.push_back(
      {[=] { kernel(call); }, static_cast<unsigned>(blocks), static_cast<unsigned>(threads)});
  return cudaSuccess;
}

}  // namespace lamina
