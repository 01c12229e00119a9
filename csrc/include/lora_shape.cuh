// What low-rank adapters add to projections: arguments, sizes, and the outputs of a block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pdl.cuh"

namespace lamina {

constexpr int kLoraThreads = 256, kLoraWarps = kLoraThreads / 32;
constexpr int kSegments = 8;              // of the columns
constexpr int kFewTokens = 8;             // up to which more blocks are better than fewer reads of A
constexpr int kManyTokens = 256;          // beyond which they are of prompts, and neighbours have the same slot
constexpr size_t kLoraMemory = 48 << 10;  // that every kernel may have

// As the caller packs them: 8 bytes each, strides in elements.
struct LoraArguments {
  const void* y;
  int64_t y_token;
  const void* x;
  int64_t x_token;
  const void *a, *b;
  const float* scales;
  const int32_t* slots;
  void* out;
  int64_t tokens, num_slots, columns, rank;
  int64_t rows0, rows1, rows2, rows3;  // of each part, 0 beyond the last
  int64_t dtype;
  int64_t blocks_beside;  // that find room beside the kernel ahead, which promises that x is complete; 0: it does not
  cudaStream_t stream;
};

template <typename T>
struct Lora {
  const T *y, *x;
  const T* a;           // [slots][parts * rank][columns]
  const T* b;           // [slots][num_rows][rank]
  const float* scales;  // [slots][parts]
  const int32_t* slots;
  T* out;  // contiguous
  int64_t y_token, x_token;
  int tokens, columns, rank, num_parts, num_rows;
  int rows[4];      // of each part
  int tiled_parts;  // parts over which clusters are, each of one; 1: all have the first and others
  int block_rows, num_tiles, num_groups;  // outputs of a segment's block; clusters of some tokens; slots at once

  // Floats of a token's shrunk numbers: they are read in fours, and written in pairs.
  __host__ __device__ int width() const { return (rank + 3) / 4 * 4; }
  __host__ __device__ int tiles_of(int part) const {
    return (rows[part] + kSegments * block_rows - 1) / (kSegments * block_rows);
  }
  void set_block_rows(int count) {
    block_rows = count, num_tiles = 0;
    for (int part = 0; part < tiled_parts; ++part) num_tiles += tiles_of(part);
  }
};

// Outputs of one part.
struct LoraTile {
  int part, first, last;
};

template <int kCluster, typename T>
__device__ __forceinline__ LoraTile tile_of(const Lora<T>& p, int tile, int block) {
  int part = 0, offset = 0;
  for (; tile >= p.tiles_of(part); ++part) tile -= p.tiles_of(part), offset += p.rows[part];
  const int each = kSegments / kCluster * p.block_rows, first = offset + (tile * kCluster + block) * each;
  return {part, first, min(first + each, offset + p.rows[part])};
}

template <typename T>
__device__ __forceinline__ const T* matrix_a(const Lora<T>& p, int slot, int part) {
  return p.a + (static_cast<int64_t>(slot) * p.num_parts + part) * p.rank * p.columns;
}

template <typename T>
Lora<T> unpacked(const LoraArguments& p) {
  Lora<T> own{static_cast<const T*>(p.y),
              static_cast<const T*>(p.x),
              static_cast<const T*>(p.a),
              static_cast<const T*>(p.b),
              p.scales,
              p.slots,
              static_cast<T*>(p.out),
              p.y_token,
              p.x_token};
  own.tokens = static_cast<int>(p.tokens), own.columns = static_cast<int>(p.columns);
  own.rank = static_cast<int>(p.rank);
  for (const int64_t rows : {p.rows0, p.rows1, p.rows2, p.rows3}) {
    if (rows == 0) break;
    own.rows[own.num_parts++] = static_cast<int>(rows), own.num_rows += static_cast<int>(rows);
  }
  own.tiled_parts = own.num_parts;
  own.set_block_rows((p.tokens <= kFewTokens ? 1 : 4) * kLoraThreads);
  return own;
}

}  // namespace lamina
