// Thread-block clusters (sm_90 and later): blocks that run at once, meet, and read each other's shared memory.
#pragma once

#include <cstdint>

namespace lamina {

// Every thread of the cluster's blocks arrives once, then waits once.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// What any thread of the cluster stored to shared memory is then seen by all of them.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where a block of the cluster has what lies here in this block's shared memory.
template <typename T>
__device__ __forceinline__ const T* in_peer(const T* own, int rank) {
#if __CUDA_ARCH__ >= 900
  const T* its;
  asm("mapa.u64 %0, %1, %2;" : "=l"(its) : "l"(own), "r"(rank));
  return its;
#else
  return own;
#endif
}

}  // namespace lamina
