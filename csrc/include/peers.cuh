// Ranks that reach each other's memory: where each keeps what, and how the blocks of all of them meet in a kernel.
//
// A rank's memory is a header; three buffers of max_bytes, of which two take turns as its input and one has results of
// its share; and two that take turns for packets that every other rank sends it (peer_packets.cuh). All ranks run the
// same kernels one after another, each with an epoch, one more than that of the kernel before, of whatever kind it was.
//
// Why nobody waits before a buffer is written again. Of kernels of every kind and of any number of blocks:
// (1) What a rank says in epoch e, by flags or packets, it says behind the end of its kernel e - 1: all reads of that
// one's blocks have returned, and all packets that were sent to it in epoch e - 1 have come, as they wait for them.
// (2) Its kernel e ends behind what every other rank says in epoch e: each block meets that of the same number, or
// waits for packets. One that has nothing to sum may do neither, but no kernel is launched of which no block has
// anything. So a rank in epoch e has ended epoch e - 1, and has heard there from each other one (2), which had ended
// epoch e - 2 before (1). What was written for epoch e - 2 or an earlier one is read no more, and none of its packets
// is under way. Nothing else can be in the buffers whose turn is e % 2, whatever kinds the kernels e - 1 and e - 2 were
// of, since (1) and (2) are of them all. The buffer of results takes no turns: it is written behind a meeting of epoch
// e, to which no rank comes before it has ended epoch e - 1 (1).
//
// Flags hold epochs and are never reset, and the epoch lies in the rank's memory, so that a CUDA graph may be replayed.
// No epoch is 0, which new memory holds. Two in a row differ in their last bit also where numbers begin anew.
#pragma once

#include "launch_ranks.cuh"
#include "system_scope.cuh"
#include "vec.cuh"

namespace lamina {

// custom_ops/all_reduce/peers.py has the same numbers.
constexpr int kMaxRanks = 8, kMaxPeerBlocks = 128;
constexpr int64_t kHeaderBytes = 16384;
constexpr int64_t kPacketBytes = 65536;  // of a tensor that is sent in packets, at most

constexpr int kNumMeetings = 2;  // of a kernel, at most
constexpr int64_t kPacketsOfRank = 2 * kPacketBytes / kVecBytes;

struct RankPointers {  // 8 words
  void* of[kMaxRanks];
};

struct PeerHeader {
  uint32_t flags[kNumMeetings][kMaxPeerBlocks][kMaxRanks];  // the epoch in which a rank's block has come as far
  uint32_t epoch;                                           // of the kernel that has ended
  uint32_t num_left;                                        // blocks of the kernel that runs that know its epoch
};
static_assert(sizeof(PeerHeader) <= kHeaderBytes, "the buffers begin behind it");

// What of the arguments says who the ranks are.
struct PeerRanks {
  RankPointers memory;  // of every rank, as this device reaches it
  int num_ranks;
  int first_rank;  // of those that this launch runs, one a row of its grid: else than in tests that is one
  int64_t max_bytes;
};

__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch) { return epoch == UINT32_MAX ? 2 : epoch + 1; }

// A vector of each rank, of which there are kRanks at most.
template <typename T, int kWidth, int kRanks = kMaxRanks>
struct Parts {
  Vec<T, kWidth> of[kRanks];
};

// What get(rank) returns for each of num_ranks, all of them under way at once.
template <typename T, int kWidth, int kRanks = kMaxRanks, typename Get>
__device__ __forceinline__ Parts<T, kWidth, kRanks> parts_of_ranks(int num_ranks, const Get& get) {
  Parts<T, kWidth, kRanks> parts;
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank)
    if (rank < num_ranks) parts.of[rank] = get(rank);
  return parts;
}

// Their sum in the order of ranks, as float, rounded once.
template <typename T, int kWidth, int kRanks>
__device__ __forceinline__ Vec<T, kWidth> sum_of(const Parts<T, kWidth, kRanks>& parts, int num_ranks) {
  float sum[kWidth];
  to_floats(sum, parts.of[0]);
#pragma unroll
  for (int rank = 1; rank < kRanks; ++rank) {
    if (rank >= num_ranks) break;
    float values[kWidth];
    to_floats(values, parts.of[rank]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += values[i];
  }
  return from_floats<T>(sum);
}

// A block of one rank, in the kernel that runs.
class PeerBlock {
 public:
  // After the kernel before has ended.
  __device__ __forceinline__ explicit PeerBlock(const PeerRanks& ranks)
      : ranks_(ranks), rank_(ranks.first_rank + static_cast<int>(blockIdx.y)) {
    epoch_ = epoch_after(*static_cast<volatile uint32_t*>(&header(rank_)->epoch));
  }

  __device__ __forceinline__ int rank() const { return rank_; }
  __device__ __forceinline__ int num_ranks() const { return ranks_.num_ranks; }
  __device__ __forceinline__ uint32_t epoch() const { return epoch_; }

  template <typename T>
  __device__ __forceinline__ T* input(int rank) const {
    return reinterpret_cast<T*>(bytes(rank) + kHeaderBytes + (epoch_ % 2) * ranks_.max_bytes);
  }
  template <typename T>
  __device__ __forceinline__ T* result(int rank) const {
    return reinterpret_cast<T*>(bytes(rank) + kHeaderBytes + 2 * ranks_.max_bytes);
  }
  // Those that one rank sends another, in the memory of the latter.
  __device__ __forceinline__ Packet* packets(int to, int from) const {
    Packet* first = reinterpret_cast<Packet*>(bytes(to) + kHeaderBytes + 3 * ranks_.max_bytes);
    return first + (epoch_ % 2 * kMaxRanks + from) * kPacketsOfRank;
  }

  // Every rank's vector at this element of the input.
  template <typename T>
  __device__ __forceinline__ Parts<T, kVecWidth<T>> inputs(int64_t at) const {
    constexpr int kWidth = kVecWidth<T>;
    return parts_of_ranks<T, kWidth>(ranks_.num_ranks, [&](int rank) { return load<kWidth>(input<T>(rank) + at); });
  }

  // Returns once the same block of every rank has come here, and what it wrote before can be read. All threads call it.
  template <int kMeeting>
  __device__ __forceinline__ void meet() {
    static_assert(kMeeting < kNumMeetings);
    const int other = static_cast<int>(threadIdx.x);
    if (kMeeting == 0)
      leave();
    else
      __syncthreads();
    if (other < ranks_.num_ranks) {
      store_release(&header(other)->flags[kMeeting][blockIdx.x][rank_], epoch_);
      const uint32_t* flag = &header(rank_)->flags[kMeeting][blockIdx.x][other];
      while (!has_come(load_acquire(flag))) {
      }
    }
    __syncthreads();
  }

  // To be called by all threads of every block, unless they meet, once each has what it needs of the epoch in memory,
  // which the last block then sets: none will ask for it again before the next kernel. The last thread waits for how
  // many have left, while flags or packets are under way.
  __device__ __forceinline__ void leave() {
    __syncthreads();
    if (threadIdx.x != blockDim.x - 1) return;
    PeerHeader* own = header(rank_);
    if (gridDim.x == 1 || atomicInc(&own->num_left, gridDim.x - 1) == gridDim.x - 1) own->epoch = epoch_;
  }

 private:
  // Who came to a meeting may have gone on to the next kernel, which ends only with this rank's. Any other flag is of
  // a meeting before, however long ago: to ask which is greater would be wrong 2^31 kernels later.
  __device__ __forceinline__ bool has_come(uint32_t flag) const {
    return flag == epoch_ || flag == epoch_after(epoch_);
  }

  __device__ __forceinline__ char* bytes(int rank) const { return static_cast<char*>(ranks_.memory.of[rank]); }
  __device__ __forceinline__ PeerHeader* header(int rank) const { return reinterpret_cast<PeerHeader*>(bytes(rank)); }

  const PeerRanks& ranks_;
  int rank_;
  uint32_t epoch_;
};

inline PeerRanks unpacked_ranks(const RankPointers& memory, int64_t num_ranks, int64_t first_rank, int64_t max_bytes) {
  return {memory, narrow(num_ranks), narrow(first_rank), max_bytes};
}

inline bool is_group(int64_t num_ranks, int64_t num_local, int64_t max_blocks) {
  return num_ranks >= 1 && num_ranks <= kMaxRanks && num_local >= 1 && num_local <= num_ranks && max_blocks >= 1 &&
         max_blocks <= kMaxPeerBlocks;
}

}  // namespace lamina
