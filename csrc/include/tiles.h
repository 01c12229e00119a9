// The AMX instructions that kernels use beside the compiler's own, and whether a process may use them.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace lamina {

// Whether the system lets this process use AMX tiles; asks it once (arch_prctl).
inline bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// The compiler's own ask for literals, and do not say that memory is read.
template <int tile>
inline void load_tile(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(tile) : "memory");
}

template <int tile>
inline void stream_tile(const void* from) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(tile) : "memory");
}

template <int tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// sums += a @ b
template <int sums, int a, int b>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

}  // namespace lamina
