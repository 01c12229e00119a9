// Words by which threads of several GPUs order what they write and read.
#pragma once

#include <cstdint>

namespace lamina {

// Who acquires the value has what this block wrote before, once its threads have met.
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The compiler loses what it knows of an address, so that it does not compute it anew in every round of a loop.
template <typename Place>
__device__ __forceinline__ Place* kept_address(Place* place) {
  asm volatile("" : "+l"(place));
  return place;
}

// Words of 8 bytes, each of which another GPU writes at once: none is found half old and half new.
struct alignas(16) Packet {
  uint64_t words[2];
};

__device__ __forceinline__ void store_packet(Packet* to, const Packet& packet) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(packet.words[0]), "l"(packet.words[1])
               : "memory");
}

__device__ __forceinline__ Packet load_packet(const Packet* from) {
  Packet packet;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(packet.words[0]), "=l"(packet.words[1])
               : "l"(from)
               : "memory");
  return packet;
}

}  // namespace lamina
