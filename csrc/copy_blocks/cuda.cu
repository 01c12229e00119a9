// The C entry point of copy_blocks on CUDA.
#include "kernel.cuh"

// As the caller packs them: 8 bytes each, strides and sizes in bytes.
struct CopyBlocksArguments {
  void* key_cache;
  int64_t key_block;
  void* value_cache;
  int64_t value_block;
  const int32_t* block_mapping;
  int64_t num_pairs, block_bytes, element_size;
  cudaStream_t stream;
};

extern "C" {
int64_t copy_blocks_arguments_size() { return sizeof(CopyBlocksArguments); }

int copy_blocks(const CopyBlocksArguments* p) {
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kBytes = sizeof(T);
    const lamina::CopyBlocks<T> args{static_cast<T*>(p->key_cache),
                                     static_cast<T*>(p->value_cache),
                                     p->key_block / kBytes,
                                     p->value_block / kBytes,
                                     p->block_bytes / kBytes,
                                     p->block_mapping,
                                     p->num_pairs};
    return lamina::copy_blocks(args, p->stream);
  };
  const int64_t sizes = p->key_block | p->value_block | p->block_bytes;
  return lamina::with_unit(p->element_size, sizes, launch, p->key_cache, p->value_cache);
}
}
