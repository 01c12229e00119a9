// Sums over ranks of few bytes: each rank sends what it has to every other, in packets, and waits for theirs.
//
// A packet has half a vector, each word of it beside the epoch, in 8 bytes that come as one. Who finds the epoch there
// has the word: nothing is fenced, no flag follows, and nobody reads over the link, which is crossed once. What lies
// there before has no epoch, as memory is new, or that of another kernel: after 2^32 of them the same one again, to be
// found only where nothing was sent to that place in between. A packet is twice as long as what it says, so that a
// meeting costs less where there is much to say. Why it may be written without waiting: peers.cuh.
#pragma once

#include <cstring>
#include <type_traits>

#include "peers.cuh"

namespace lamina {

// Which vectors of a tensor are a thread's: the first, and every step'th on from it before the end.
struct OwnVecs {
  int first, step, end;

  __device__ __forceinline__ int at(int i) const { return first + i * step; }
  __device__ __forceinline__ bool has(int i) const { return at(i) < end; }
};

// f(number, rank) for the ranks other than this one, of at most kRanks, in their order.
template <int kRanks, typename Function>
__device__ __forceinline__ void for_others(const PeerBlock& peers, const Function& f) {
#pragma unroll
  for (int other = 0; other < kRanks - 1; ++other)
    if (other + 1 < peers.num_ranks()) f(other, other + (other >= peers.rank()));
}

// Of the packets that one rank sends another, that of half a vector: halves of neighbours are neighbours, since threads
// move them at once.
template <typename Place>
__device__ __forceinline__ Place* packet_of(Place* packets, int vec, int half) {
  return packets + half * (kPacketBytes / kVecBytes) + vec;
}

__device__ __forceinline__ Packet packet_with(uint32_t epoch, uint32_t first, uint32_t second) {
  const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
  return {flag | first, flag | second};
}

// 0 where a packet is of this epoch.
__device__ __forceinline__ uint32_t difference(const Packet& packet, uint32_t epoch) {
  const auto first = static_cast<uint32_t>(packet.words[0] >> 32);
  const auto second = static_cast<uint32_t>(packet.words[1] >> 32);
  return (first ^ epoch) | (second ^ epoch);
}

template <typename T>
__device__ __forceinline__ Vec<T, kVecWidth<T>> vec_of(const Packet (&halves)[2]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = static_cast<uint32_t>(halves[i / 2].words[i % 2]);
  Vec<T, kVecWidth<T>> vec;
  memcpy(&vec.raw, words, sizeof(words));
  return vec;
}

// A thread's vectors, to every other rank.
template <int kRanks, int kVecs, typename T>
__device__ __forceinline__ void send(const PeerBlock& peers, const OwnVecs& own,
                                     const Vec<T, kVecWidth<T>> (&vecs)[kVecs]) {
  for_others<kRanks>(peers, [&](int, int to) {
    Packet* packets = peers.packets(to, peers.rank());
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!own.has(i)) continue;
      uint32_t words[4];
      memcpy(words, &vecs[i].raw, sizeof(words));
      store_packet(packet_of(packets, own.at(i), 0), packet_with(peers.epoch(), words[0], words[1]));
      store_packet(packet_of(packets, own.at(i), 1), packet_with(peers.epoch(), words[2], words[3]));
    }
  });
}

// Other ranks' vectors, from number `first` of a thread's own on, once all of them are here.
template <int kRanks, int kVecs>
__device__ __forceinline__ void receive(const PeerBlock& peers, const OwnVecs& own, int first,
                                        Packet (&packets)[kVecs][kRanks - 1][2]) {
  const Packet* begin = kept_address(peers.packets(peers.rank(), 0) + own.at(first));
  const auto for_packets = [&](const auto& f) {
    for_others<kRanks>(peers, [&](int other, int from) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (own.has(first + i))
            f(packets[i][other][half], packet_of(begin + from * kPacketsOfRank, i * own.step, half));
    });
  };
  uint32_t differences;
  do {
    for_packets([&](Packet& packet, const Packet* place) { packet = load_packet(place); });  // all under way at once
    differences = 0;
    for_packets([&](const Packet& packet, const Packet*) { differences |= difference(packet, peers.epoch()); });
  } while (differences != 0);
}

// Makes of a thread's vectors their sums over all ranks, as sum_of has them, once the others' are here. It asks for as
// many at once as registers hold, since each time takes a way to memory and back.
template <int kRanks, int kVecs, typename T>
__device__ __forceinline__ void add_others(const PeerBlock& peers, const OwnVecs& own,
                                           Vec<T, kVecWidth<T>> (&vecs)[kVecs]) {
  constexpr int kWidth = kVecWidth<T>, kOthers = kRanks - 1;
  constexpr int kFit = 2 * kMaxRanks / kRanks, kBatch = kVecs < kFit ? kVecs : kFit;
  static_assert(kVecs % kBatch == 0);
#pragma unroll
  for (int first = 0; first < kVecs; first += kBatch) {
    Packet packets[kBatch][kOthers][2];
    receive<kRanks>(peers, own, first, packets);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Vec<T, kWidth> vec = vecs[first + i];
      const auto part = [&](int rank) {
        const Vec<T, kWidth> lower = vec_of<T>(packets[i][rank < kOthers ? rank : kOthers - 1]);
        const Vec<T, kWidth> upper = vec_of<T>(packets[i][rank > 0 ? rank - 1 : 0]);
        return rank < peers.rank() ? lower : rank > peers.rank() ? upper : vec;
      };
      vecs[first + i] = sum_of(parts_of_ranks<T, kWidth, kRanks>(peers.num_ranks(), part), peers.num_ranks());
    }
  }
}

// Calls launch(how many ranks a kernel is made for): of fewer, registers hold packets of more vectors.
template <typename Launch>
int with_most_ranks(int64_t num_ranks, const Launch& launch) {
  if (num_ranks <= 2) return launch(std::integral_constant<int, 2>{});
  if (num_ranks <= 4) return launch(std::integral_constant<int, 4>{});
  return launch(std::integral_constant<int, kMaxRanks>{});
}

// Whether a tensor is to be sent in packets, by so many blocks, each of which has all of its vectors at once.
inline bool goes_in_packets(int64_t bytes, int64_t packet_bytes, int64_t blocks, int64_t max_blocks) {
  return bytes <= smaller(packet_bytes, kPacketBytes) && blocks <= max_blocks;
}

}  // namespace lamina
