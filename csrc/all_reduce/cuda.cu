// The C entry points of all_reduce on CUDA: the kernels, and memory that ranks in processes of their own can read.
#include "kernel.cuh"

extern "C" {
int64_t all_reduce_arguments_size() { return sizeof(lamina::AllReduceArguments); }

int all_reduce(const lamina::AllReduceArguments* p) { return lamina::all_reduce(*p); }

// Zeroed memory of the current device, no part of any pool, and the handle by which other processes open it.
int peer_memory_allocate(int64_t bytes, void** memory, cudaIpcMemHandle_t* handle) {
  cudaError_t error = cudaMalloc(memory, static_cast<size_t>(bytes));
  if (error != cudaSuccess) return lamina::cleared(error);
  error = cudaMemset(*memory, 0, static_cast<size_t>(bytes));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(handle, *memory);
  if (error != cudaSuccess) cudaFree(*memory);
  return lamina::cleared(error);
}

// The memory of another process's device, which this one may not even see, as the current device reaches it.
int peer_memory_open(const cudaIpcMemHandle_t* handle, void** memory) {
  return lamina::cleared(cudaIpcOpenMemHandle(memory, *handle, cudaIpcMemLazyEnablePeerAccess));
}

int peer_memory_close(void* memory) { return lamina::cleared(cudaIpcCloseMemHandle(memory)); }

int peer_memory_free(void* memory) { return lamina::cleared(cudaFree(memory)); }

int peer_memory_copy(void* to, const void* from, int64_t bytes) {
  return lamina::cleared(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault));
}
}
