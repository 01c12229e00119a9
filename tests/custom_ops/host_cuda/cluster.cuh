// In place of hopper.cuh, warpgroup.cuh, cuda_mma.cuh, pdl.cuh, vec.cuh and pair_ops.cuh: what a cluster of blocks
// needs to run on a host as plain C++.
//
// Threads are fibers, of which a seeded generator lets some go on and others wait. Copies, and sums that are sent,
// arrive later, in any order. Barriers, swizzled tiles and the registers of WGMMA are those of the GPU.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bf16.cuh"
#include "byte_formats.cuh"
#include "fiber.cuh"
#include "float_ops.cuh"
#include "fp8.cuh"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct CUtensorMap {  // sizes, strides and boxes in elements of so many bytes
  const void* data;
  std::array<int64_t, 4> sizes, strides;
  std::array<int, 4> box;
  int bytes = 2;
};
using std::max;
using std::min;

namespace host {

constexpr size_t kMemory = 228 << 10, kBegin = 16;  // where dynamic memory begins
constexpr int kPatience = 1000;                     // rounds without news
constexpr int kIdle = 200;                          // after which nothing goes on by itself

struct Barrier {
  int count = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  std::set<int64_t> arrived;  // warps, in this phase
};
struct Warp {
  std::array<uint64_t, 32> given{}, taken{};
  int num_given = 0, round = 0;
};
// A block's shared memory: its own, or of one block alone where an array of the kernel's begins at kBegin.
inline char* only_array;
class Memory {
 public:
  Memory() : own_(only_array == nullptr ? kMemory : 0, 0x7f) {
    if (only_array != nullptr) std::memset(only_array, 0x7f, kMemory - kBegin);
  }
  char* data() { return only_array == nullptr ? own_.data() : only_array - kBegin; }
  static constexpr size_t size() { return kMemory; }
  char& operator[](size_t place) { return data()[place]; }

 private:
  std::vector<char> own_;
};
struct Named {
  int num_there = 0, round = 0;
};
struct Block {
  Memory memory;
  std::map<int, Named> named;
  std::map<uint32_t, Barrier> barriers;
  std::vector<Warp> warps;
  int num_alive = 0, num_synced = 0, sync_round = 0;
};
struct Fiber {
  Turns turns;
  int block = 0;
  unsigned thread = 0;
  bool is_done = false;
  std::vector<std::function<void()>> wgmmas;  // begun, of which none has read its tiles yet
  std::deque<size_t> committed;               // as many of those in each group, the oldest first
};

inline std::vector<Block> blocks;
inline std::vector<Fiber> fibers;
inline Fiber* current;
inline std::mt19937 generator;
inline std::vector<std::function<void()>> arriving;
inline std::function<void()> body;
inline std::function<void()> predecessor;      // what the kernel ahead has still to do; none: it has ended
inline bool waits_until_idle;                  // which it always does then when nothing else goes on
inline int64_t num_early;                      // copies that began before
inline std::map<const char*, int> prefetched;  // bytes, and how often
inline std::map<int, bool> starts;             // blocks that let the kernel behind begin: whether one has before
inline std::string failure;
inline int64_t news;
inline std::map<const void*, int64_t> waits_at_cluster;  // of a fiber
inline int64_t num_at_cluster;
inline unsigned num_threads;  // of a block
inline uint32_t num_bytes;    // of its dynamic memory
inline unsigned block_row;    // blockIdx.y of them all

inline Block& block() { return blocks[current->block]; }
inline Warp& warp() { return block().warps[current->thread / 32]; }
inline void yield() { current->turns.yield(); }
inline void check(bool is_right, const char* text) {
  if (!is_right && failure.empty()) failure = text;
}

inline void settle(Barrier& barrier) {
  ++news;
  check(barrier.pending >= 0, "a barrier counts more arrivals than a phase has");
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase, barrier.pending = barrier.count;
  barrier.arrived.clear();
}

// Where a block has nothing else: within its memory, and no barrier.
inline void check_place(const Block& block, uint32_t offset, uint32_t bytes) {
  check(offset >= kBegin && offset + bytes <= kBegin + num_bytes, "a place is not in a block's memory");
  const auto next = block.barriers.lower_bound(offset < 7 ? 0 : offset - 7);
  check(next == block.barriers.end() || next->first >= offset + bytes, "there is a barrier at this place");
}

inline void change(int rank, uint32_t offset, int arrivals, int64_t bytes) {
  check(blocks[rank].num_alive > 0, "a block has ended that others still write to");
  const auto found = blocks[rank].barriers.find(offset);
  if (found == blocks[rank].barriers.end()) return check(false, "there is no barrier at this place");
  const int by = found->second.count > static_cast<int>(num_threads / 32) ? 1 : 32;  // threads or warps
  if (arrivals != 0)
    check(found->second.arrived.insert((current - fibers.data()) / by).second, "a warp arrives twice in a phase");
  found->second.pending -= arrivals, found->second.bytes += bytes;
  settle(found->second);
}

// What every lane of the warp gives.
template <typename Value>
const std::array<uint64_t, 32>& multicast(const Value& value) {
  Warp& own = warp();
  std::memcpy(&own.given[current->thread % 32], &value, sizeof(Value));
  const int round = own.round;
  if (++own.num_given == 32)
    own.taken = own.given, own.num_given = 0, ++own.round, ++news;
  else
    while (own.round == round) yield();
  return own.taken;
}

template <typename Value>
Value from_lane(const Value& value, unsigned lane) {
  Value result;
  std::memcpy(&result, &multicast(value)[lane % 32], sizeof(Value));
  return result;
}

inline void run_fiber() {
  body();
  check(current->wgmmas.empty(), "nobody waits for wgmmas");
  current->is_done = true;
  Turns::leave();
}

inline void arrive_some(bool all) {
  while (!arriving.empty() && (all || generator() % 64 == 0)) {
    std::swap(arriving[generator() % arriving.size()], arriving.back());
    const auto effect = std::move(arriving.back());
    arriving.pop_back();
    effect();
  }
}

// Runs function() as all threads of one cluster, which begins at this block; what went wrong is in `failure`.
inline void run_cluster(unsigned first, int num_blocks, unsigned threads, uint32_t bytes,
                        std::function<void()> function) {
  body = std::move(function), num_threads = threads, num_bytes = bytes, num_at_cluster = 0, waits_at_cluster.clear();
  blocks.assign(num_blocks, Block{});
  fibers.resize(num_blocks * threads);
  for (Block& each : blocks) each.warps.resize(threads / 32), each.num_alive = static_cast<int>(threads);
  std::vector<unsigned> pause(num_blocks * threads / 32);  // of each warp
  for (unsigned& each : pause) each = generator() % 3 != 0 ? 1 : 1 + generator() % 6;
  std::vector<Fiber*> alive;
  for (Fiber& fiber : fibers) {
    const size_t i = &fiber - fibers.data();
    fiber.block = static_cast<int>(i / threads), fiber.thread = i % threads, fiber.is_done = false;
    fiber.wgmmas.clear(), fiber.committed.clear();
    fiber.turns.begin(run_fiber);
    alive.push_back(&fiber);
  }
  int64_t before = -1;
  const int idle_ahead = predecessor && !waits_until_idle && generator() % 4 == 0 ? 0 : kIdle;  // rounds
  for (int rounds = 0; !alive.empty() && failure.empty(); ++rounds) {
    if (news != before) rounds = 0, before = news;
    check(rounds < kPatience, "all wait");
    if (predecessor && rounds >= idle_ahead) std::exchange(predecessor, nullptr)(), ++news;
    for (size_t i = 0; i < alive.size(); ++i) {
      if (generator() % pause[(alive[i] - fibers.data()) / 32] != 0) continue;
      current = alive[i], threadIdx = {current->thread, 0, 0}, blockIdx = {first + current->block, block_row, 0};
      current->turns.go_on();
      arrive_some(false);
      if (!current->is_done) continue;
      --block().num_alive, ++news;
      alive[i--] = alive.back();
      alive.pop_back();
    }
    if (alive.size() < 64 || rounds % 64 == 63) arrive_some(true);
  }
  for (const Block& each : blocks)
    for (const auto& [offset, barrier] : each.barriers)
      check(barrier.bytes == 0 && barrier.pending == barrier.count, "a barrier is left within a phase");
  check(arriving.empty(), "copies arrive after the end");
  arriving.clear();
}

// The same while the kernel ahead still runs, for as long as anything else goes on; every block lets the kernel behind
// begin, but not before that has ended.
inline void run_promising_cluster(unsigned first, int num_blocks, unsigned threads, uint32_t bytes,
                                  std::function<void()> function) {
  predecessor = [] {}, waits_until_idle = true;
  starts.clear();
  run_cluster(first, num_blocks, threads, bytes, std::move(function));
  waits_until_idle = false;
  check(static_cast<int>(starts.size()) == num_blocks, "a block does not let the kernel behind begin");
  for (const auto& [block, is_early] : starts) check(!is_early, "the kernel behind begins before x is there");
}

}  // namespace host

template <typename Value>
Value __shfl_sync(unsigned, const Value& value, int lane) {
  return host::from_lane(value, lane);
}
template <typename Value>
Value __shfl_xor_sync(unsigned, const Value& value, int bits) {
  return host::from_lane(value, threadIdx.x ^ bits);
}
template <typename Value>
unsigned __match_any_sync(unsigned, const Value& value) {
  const auto& given = host::multicast(value);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    same |= (std::memcmp(&given[lane], &value, sizeof(Value)) == 0) * 1u << lane;
  return same;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto& given = host::multicast(value);
  unsigned set = 0;
  for (unsigned lane = 0; lane < 32; ++lane) set |= static_cast<unsigned>(given[lane] & 1) << lane;
  return set;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __syncwarp() { host::multicast(0); }
inline void __syncthreads() {
  host::Block& own = host::block();
  const int round = own.sync_round;
  if (++own.num_synced == static_cast<int>(host::num_threads))
    own.num_synced = 0, ++own.sync_round;
  else
    while (own.sync_round == round) host::yield();
}

namespace lamina {

constexpr unsigned kAllLanes = 0xffffffffu;

// ---- hopper.cuh, pdl.cuh, warpgroup.cuh

// Of what lies in a block's memory its place there; of an array of dynamic memory where that begins.
inline uint32_t shared_address(const void* pointer) {
  auto& memory = host::block().memory;
  const auto offset = static_cast<const char*>(pointer) - memory.data();
  return offset >= 0 && offset < static_cast<std::ptrdiff_t>(memory.size()) ? static_cast<uint32_t>(offset)
                                                                            : uint32_t{host::kBegin};
}
inline float* shared_floats(uint32_t offset) { return reinterpret_cast<float*>(&host::block().memory[offset]); }
inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  host::check(count > 0 && barrier % 8 == 0, "no count or place of a barrier");
  host::check_place(host::block(), barrier, 8);
  host::block().barriers[barrier] = {count, count};
}
inline void publish_barriers() {}
inline void arrive(uint32_t barrier) { host::change(host::current->block, barrier, 1, 0); }
inline void arrive_at_peer(uint32_t barrier, uint32_t rank) { host::change(static_cast<int>(rank), barrier, 1, 0); }
inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  host::change(host::current->block, barrier, 1, bytes);
}
inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  while (static_cast<uint32_t>(host::block().barriers[barrier].phase & 1) == parity) host::yield();
}
inline bool has_ended(uint32_t barrier, uint32_t parity) {
  return static_cast<uint32_t>(host::block().barriers[barrier].phase & 1) != parity;
}
inline uint32_t clocks() {
  static uint32_t count = 0;
  host::yield(), ++host::news;
  return count += 16;
}
inline void arrive_threads(int barrier, int threads) {
  host::Named& own = host::block().named[barrier];
  host::check(own.num_there < threads, "more threads come to a named barrier than it is for");
  if (++own.num_there == threads) own.num_there = 0, ++own.round, ++host::news;
}
inline void sync_threads(int barrier, int threads) {
  const int round = host::block().named[barrier].round;
  arrive_threads(barrier, threads);
  while (host::block().named[barrier].round == round) host::yield();
}
inline void fence_shared_for_async() {}
inline uint64_t evict_first() { return 0; }
inline uint64_t evict_last() { return 0; }
inline void prefetch_to_l2(const void*) {}
inline void bulk_prefetch_to_l2(const void* from, uint32_t bytes) {
  host::check(reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0, "a prefetch is of no multiples of 16");
  const auto* begin = static_cast<const char*>(from);
  for (uint32_t i = 0; i < bytes; ++i) host::prefetched[begin + i] += 1;
}
inline void prefetch_tensor_map(const CUtensorMap*) {}
inline int swizzled(int row, int byte) { return row * 128 + (byte ^ (row % 8 * 16)); }

inline void tma_load_to(int rank, uint32_t to, const CUtensorMap* from, int x, int y, int z, int w, uint32_t barrier) {
  host::check(to % 1024 == 0, "a tile begins at no multiple of 1024");
  host::num_early += host::predecessor ? 1 : 0;
  const auto arrive_later = [to, map = *from, x, y, z, w, barrier, rank] {
    const int rows = map.box[1] * map.box[2] * map.box[3];
    host::check_place(host::blocks[rank], to, rows * 128);
    for (int i = 0; i < rows * map.box[0]; ++i) {
      const int row = i / map.box[0];
      const int64_t at[4] = {x + i % map.box[0], y + row % map.box[1], z + row / map.box[1] % map.box[2],
                             w + row / map.box[1] / map.box[2]};
      bool is_inside = true;
      int64_t place = 0;
      for (int d = 0; d < 4; ++d) is_inside &= at[d] < map.sizes[d], place += at[d] * map.strides[d];
      const char none[2] = {}, *element = static_cast<const char*>(map.data) + place * map.bytes;
      std::memcpy(&host::blocks[rank].memory[to + swizzled(row, i % map.box[0] * map.bytes)],
                  is_inside ? element : none, map.bytes);
    }
    host::change(rank, barrier, 0, -rows * 128);
  };
  host::arriving.emplace_back(arrive_later);
}
inline void tma_load(uint32_t to, const CUtensorMap* from, int x, int y, int z, int w, uint32_t barrier, uint64_t) {
  tma_load_to(host::current->block, to, from, x, y, z, w, barrier);
}
inline void tma_load(uint32_t to, const CUtensorMap& from, int x, int y, int z, int w, uint32_t barrier) {
  tma_load_to(host::current->block, to, &from, x, y, z, w, barrier);
}
inline void tma_load(uint32_t to, const CUtensorMap* from, int x, int y, uint32_t barrier, uint64_t) {
  tma_load_to(host::current->block, to, from, x, y, 0, 0, barrier);
}
inline void tma_load_multicast(uint32_t to, const CUtensorMap* from, int x, int y, uint32_t barrier, uint16_t blocks,
                               uint64_t) {
  for (int rank = 0; rank < static_cast<int>(host::blocks.size()); ++rank)
    if (blocks >> rank & 1) tma_load_to(rank, to, from, x, y, 0, 0, barrier);
}

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  const auto start = reinterpret_cast<uintptr_t>(from);
  host::check(to % 16 == 0 && start % 16 == 0 && bytes % 16 == 0 && bytes > 0, "a bulk copy is of no multiples of 16");
  host::arriving.emplace_back([=, rank = host::current->block] {
    host::check_place(host::blocks[rank], to, bytes);
    std::memcpy(&host::blocks[rank].memory[to], from, bytes);
    host::change(rank, barrier, 0, -static_cast<int64_t>(bytes));
  });
}

inline void send_to_peer(uint32_t to, const float4& four, uint32_t barrier, uint32_t rank) {
  host::arriving.emplace_back([=] {
    host::check_place(host::blocks[rank], to, sizeof(four));
    std::memcpy(&host::blocks[rank].memory[to], &four, sizeof(four));
    host::change(static_cast<int>(rank), barrier, 0, -static_cast<int64_t>(sizeof(four)));
  });
}
inline void send_to_peer(uint32_t to, float x, float y, uint32_t barrier, uint32_t rank) {
  host::arriving.emplace_back([=, both = std::array{x, y}] {
    host::check_place(host::blocks[rank], to, sizeof(both));
    std::memcpy(&host::blocks[rank].memory[to], &both, sizeof(both));
    host::change(static_cast<int>(rank), barrier, 0, -static_cast<int64_t>(sizeof(both)));
  });
}
template <typename Value>
Value load_shared(uint32_t offset, int rank = host::current->block) {
  host::check(offset % sizeof(Value) == 0, "what is loaded begins at no multiple of its size");
  Value value;
  std::memcpy(&value, &host::blocks[rank].memory[offset], sizeof(value));
  return value;
}
inline uint32_t load_word(uint32_t offset) { return load_shared<uint32_t>(offset); }
inline uint4 load_words(uint32_t offset) { return load_shared<uint4>(offset); }
inline float4 load_four(uint32_t offset) {
  float4 four;
  std::memcpy(&four, &host::block().memory[offset], sizeof(four));
  return four;
}
inline float4 load_from_peer(uint32_t offset, uint32_t rank) {
  host::check(host::blocks[rank].num_alive > 0, "a block has ended that others still read");
  return load_shared<float4>(offset, static_cast<int>(rank));
}

inline uint64_t tile_descriptor(uint32_t offset) { return offset / 16; }
inline void wgmma_fence() {}
inline void wgmma_commit() {
  size_t earlier = 0;
  for (const size_t count : host::current->committed) earlier += count;
  host::current->committed.push_back(host::current->wgmmas.size() - earlier);
}
// They read their tiles as late as they may.
template <int pending>
void wgmma_wait() {
  host::Fiber& own = *host::current;
  for (; own.committed.size() > pending; own.committed.pop_front()) {
    const auto end = own.wgmmas.begin() + static_cast<std::ptrdiff_t>(own.committed.front());
    std::for_each(own.wgmmas.begin(), end, [](const auto& wgmma) { wgmma(); });
    own.wgmmas.erase(own.wgmmas.begin(), end);
  }
  __syncwarp();
}
template <typename T>
float number_of(T value) {
  return static_cast<float>(value);
}
inline float number_of(lamina::Int8 whole) { return whole.value; }
template <typename T>
float element(uint64_t tile, int row, int column) {
  const auto at = static_cast<uint32_t>(tile * 16);
  T value;
  const uint32_t begin = at & ~127u;
  const int byte = static_cast<int>(at & 127) + column * static_cast<int>(sizeof(T));
  std::memcpy(&value, &host::block().memory[begin + swizzled(row, byte)], sizeof(T));
  return number_of(value);
}
template <int columns, typename T, typename Sum>
void wgmma_now(Sum* sum, uint64_t left, uint64_t right) {
  const int thread = static_cast<int>(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < columns / 2; ++i) {
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2, of_left = row + i % 4 / 2 * 8;
    for (int k = 0; k < 32 / static_cast<int>(sizeof(T)); ++k)
      sum[i] += static_cast<Sum>(element<T>(left, of_left, k) * element<T>(right, column, k));
  }
}
template <int columns, typename T, typename Sum>
void wgmma(Sum (&sums)[columns / 2], uint64_t left, uint64_t right, T) {
  const auto read_later = [sum = &sums[0], left, right] { wgmma_now<columns, T>(sum, left, right); };
  host::current->wgmmas.emplace_back(read_later);
}
// Of four lanes each has a quarter of two rows of the left operand, in registers that are read as late as they may.
template <int columns, typename T>
void wgmma_from_registers(float (&sums)[columns / 2], const uint32_t* left, uint64_t right, T) {
  host::current->wgmmas.emplace_back([sum = &sums[0], left, right] {
    std::array<uint64_t, 32> halves[2];
    for (int i = 0; i < 2; ++i) halves[i] = host::multicast(uint64_t{left[2 * i + 1]} << 32 | left[2 * i]);
    const unsigned first = threadIdx.x % 32 / 4 * 4;
    for (int i = 0; i < columns / 2; ++i) {
      const int column = i / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2, lower = i % 4 / 2;
      for (int k = 0; k < 16; ++k) {
        const uint64_t registers = halves[k / 8][first + k % 8 / 2];
        T value;
        value.bits = static_cast<uint16_t>(registers >> (32 * lower + 16 * (k % 2)));
        sum[i] += static_cast<float>(value) * element<T>(right, column, k);
      }
    }
  });
}
template <int columns, int adds, typename T, typename Sum>
void wgmma_bytes(Sum (&sums)[columns / 2], uint64_t left, uint64_t right, T) {
  const auto read_later = [sum = &sums[0], left, right] {
    if (adds == 0) std::fill_n(sum, columns / 2, Sum{});
    wgmma_now<columns, T>(sum, left, right);
  };
  host::current->wgmmas.emplace_back(read_later);
}
// mma.sync and ldmatrix: lanes give what they hold, and each computes its own four sums.
inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  const auto rows = host::multicast(row);
  for (unsigned m = 0; m < 4; ++m)
    to[m] = load_shared<uint32_t>(static_cast<uint32_t>(rows[m * 8 + threadIdx.x % 32 / 4]) + threadIdx.x % 4 * 4);
}
template <typename T>
void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2], T) {
  std::array<uint64_t, 32> halves[2];
  for (int i = 0; i < 2; ++i) halves[i] = host::multicast(uint64_t{left[2 * i + 1]} << 32 | left[2 * i]);
  const auto of_right = host::multicast(uint64_t{right[1]} << 32 | right[0]);
  const auto as_float = [](uint64_t registers, int at) {
    T value;
    value.bits = static_cast<uint16_t>(registers >> at);
    return static_cast<float>(value);
  };
  const unsigned first = threadIdx.x % 32 / 4 * 4;
  for (int i = 0; i < 4; ++i) {
    const unsigned column = threadIdx.x % 4 * 2 + static_cast<unsigned>(i % 2);
    for (int k = 0; k < 16; ++k) {
      const float weight = as_float(halves[k / 8][first + k % 8 / 2], 32 * (i / 2) + 16 * (k % 2));
      sum[i] += weight * as_float(of_right[column * 4 + k % 8 / 2], 32 * (k / 8) + 16 * (k % 2));
    }
  }
}
inline void arrive_at_cluster() { ++host::num_at_cluster, ++host::news; }
inline void wait_for_cluster() {
  const int64_t wanted = ++host::waits_at_cluster[host::current] * static_cast<int64_t>(host::fibers.size());
  while (host::num_at_cluster < wanted) host::yield();
}
inline void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}
inline void wait_for_predecessor() {
  while (host::predecessor) host::yield();
}
inline void start_successor() { host::starts[host::current->block] |= static_cast<bool>(host::predecessor); }
template <int count>
void allocate_registers() {}
template <int count>
void deallocate_registers() {}
template <typename Register, int count>
void pin(Register (&)[count]) {}

// ---- cuda_mma.cuh and vec.cuh

inline uint32_t transpose_matrix(uint32_t matrix) {
  const auto& words = host::multicast(matrix);
  const int row = static_cast<int>(threadIdx.x % 32 / 4), column = static_cast<int>(threadIdx.x % 4 * 2);
  const auto at = [&](int from) { return static_cast<uint32_t>(words[from * 4 + row / 2]) >> row % 2 * 16 & 0xffff; };
  return at(column) | at(column + 1) << 16;
}
inline uint32_t pack(float low, float high, Bf16) { return Bf16(low).bits | uint32_t{Bf16(high).bits} << 16; }
template <typename T, int count>
void round_to(float (&values)[count]) {
  for (float& value : values) value = static_cast<float>(T(value));
}
template <typename T, int kWidth>
struct Vec {
  std::array<T, kWidth> raw;
};
template <typename T, int count>
Vec<T, count> from_floats(const float (&values)[count]) {
  Vec<T, count> rounded;
  for (int i = 0; i < count; ++i) rounded.raw[i] = T(values[i]);
  return rounded;
}
template <typename T, int count>
void store(T* to, const Vec<T, count>& rounded) {
  host::check(reinterpret_cast<uintptr_t>(to) % 16 == 0, "16 bytes are stored at no multiple of 16");
  std::memcpy(to, &rounded, sizeof(rounded));
}
template <int kWidth, typename T>
Vec<T, kWidth> load(const T* from) {
  host::check(reinterpret_cast<uintptr_t>(from) % sizeof(Vec<T, kWidth>) == 0,
              "a vector is read at no multiple of its size");
  Vec<T, kWidth> vec;
  std::memcpy(&vec, from, sizeof(vec));
  return vec;
}
template <int kWidth, typename T>
Vec<T, kWidth> load_from_l2(const T* from) {
  return load<kWidth>(from);
}
template <typename T, int kWidth>
void to_floats(float (&to)[kWidth], const Vec<T, kWidth>& vec) {
  for (int i = 0; i < kWidth; ++i) to[i] = static_cast<float>(vec.raw[i]);
}
template <typename T, int kWidth>
void keep_packed(Vec<T, kWidth>&) {}
inline void store_raw(void* to, const uint4& raw) {
  host::check(reinterpret_cast<uintptr_t>(to) % 16 == 0, "16 bytes are stored at no multiple of 16");
  std::memcpy(to, &raw, 16);
}

// ---- pair_ops.cuh

inline uint32_t masked_or(uint32_t bits, uint32_t mask, uint32_t base) { return (bits & mask) | base; }
inline uint32_t both_low(uint32_t pair) { return (pair & 0xffff) * 0x10001; }
inline uint32_t both_high(uint32_t pair) { return (pair >> 16) * 0x10001; }
inline float half_of(uint32_t pair, int half) {
  Bf16 value;
  value.bits = static_cast<uint16_t>(pair >> 16 * half);
  return static_cast<float>(value);
}
inline uint32_t subtract_pairs(uint32_t x, uint32_t y, Bf16) {
  return pack(half_of(x, 0) - half_of(y, 0), half_of(x, 1) - half_of(y, 1), Bf16{});
}
inline uint32_t multiply_add_pairs(uint32_t x, uint32_t y, uint32_t z, Bf16) {
  return pack(half_of(x, 0) * half_of(y, 0) + half_of(z, 0), half_of(x, 1) * half_of(y, 1) + half_of(z, 1), Bf16{});
}

}  // namespace lamina
