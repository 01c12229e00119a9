// Shuffled weights of four or eight bits written out as rows of 16-bit ones.
#pragma once

#include "dequantize.cuh"
#include "hopper.cuh"
#include "pdl.cuh"
#include "quad_transpose.cuh"
#include "shape.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kWriters = 256;  // threads a block: two tiles

// A warpgroup a tile of 64 by 64: a lane makes the registers that WGMMA would take of it, and the four lanes of a row
// exchange them, so that each has 16 neighbouring columns.
template <int kBits, typename T>
__global__ void __launch_bounds__(kWriters) write_out_kernel(LinearW4A16<T> p, T* out) {
  const int k_tiles = p.k / kNibbleColumns, in_group = threadIdx.x % 128, pair = in_group % 4;
  const int64_t tiles = static_cast<int64_t>(p.n / kRows) * k_tiles;
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * (kWriters / 128) + threadIdx.x / 128;
  const int64_t tile = wanted < tiles ? wanted : tiles - 1;  // which two may write alike
  start_successor();
  wait_for_predecessor();
  const int64_t row_tile = tile / k_tiles, row = row_tile * kRows + in_group / 32 * 16 + in_group % 32 / 4;
  const int column = static_cast<int>(tile % k_tiles) * kNibbleColumns;
  constexpr int kPieces = kBits / 4;
  uint32_t words[4 * kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint4 piece = reinterpret_cast<const uint4*>(p.weight + (tile * kPieces + i) * kPieceBytes)[in_group];
    words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
  }
  uint32_t values[4][4];  // a lane's columns and rows, and steps
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int group = (column + step * 16) / kLeastGroup >> p.group_shift;
    const int64_t at = (row_tile * p.groups + group) * (kGroupElements / 2) + in_group / 4;
    const uint32_t scales = reinterpret_cast<const uint32_t*>(p.scale)[at];
    const uint32_t zeros = p.zero == nullptr ? 0 : reinterpret_cast<const uint32_t*>(p.zero)[at];
    const RowScales rows = {{both_low(scales), both_high(scales)}, {both_low(zeros), both_high(zeros)}};
    uint32_t made[4];
    dequantize<kBits, T>(made, words + step * kPieces, rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i][step] = made[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    transpose_quad(values[i]);  // each lane one step, of which it has eight columns
    T* const to = out + (row + i % 2 * 8) * p.k + column + pair * 16 + i / 2 * 8;
    store_raw(to, uint4{values[i][0], values[i][1], values[i][2], values[i][3]});
  }
}

}  // namespace lamina
