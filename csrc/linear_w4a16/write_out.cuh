// Shuffled four-bit weights written out as rows of 16-bit ones.
#pragma once

#include "dequantize.cuh"
#include "launch.cuh"
#include "pdl.cuh"
#include "shape.cuh"

namespace lamina {

constexpr int kWritten = 256;  // threads a block: two tiles

// A warpgroup a tile of 64 by 64; a lane makes its registers as for WGMMA and stores them where they belong: four
// lanes write 16 bytes of a row, which neighbouring steps complete.
template <typename T>
__global__ void __launch_bounds__(kWritten) write_out_kernel(LinearW4A16<T> p, T* out) {
  const int k_tiles = p.k / kNibbleColumns, in_group = threadIdx.x % 128;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * (kWritten / 128) + threadIdx.x / 128;
  start_successor();
  wait_for_predecessor();
  if (tile >= static_cast<int64_t>(p.n / kRows) * k_tiles) return;
  const int64_t row_tile = tile / k_tiles, first_row = row_tile * kRows + in_group / 32 * 16 + in_group % 32 / 4;
  const int column = static_cast<int>(tile % k_tiles) * kNibbleColumns;
  const uint4 words = reinterpret_cast<const uint4*>(p.weight + tile * kNibbleBytes)[in_group];
  const uint32_t of_step[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int group = (column + step * 16) / kLeastGroup >> p.group_shift;
    const int64_t pair = (row_tile * p.groups + group) * (kGroupElements / 2) + in_group / 4;
    const uint32_t scales = reinterpret_cast<const uint32_t*>(p.scale)[pair];
    const uint32_t zeros = p.zero == nullptr ? 0 : reinterpret_cast<const uint32_t*>(p.zero)[pair];
    const RowScales rows = {{both_low(scales), both_high(scales)}, {both_low(zeros), both_high(zeros)}};
    uint32_t values[4];
    dequantize<T>(values, of_step[step], rows);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T* const to = out + (first_row + i % 2 * 8) * p.k + column + step * 16 + i / 2 * 8 + in_group % 4 * 2;
      *reinterpret_cast<uint32_t*>(to) = values[i];
    }
  }
}

template <typename T>
int write_out(const LinearW4A16<T>& p, T* out, cudaStream_t stream) {
  const int64_t tiles = static_cast<int64_t>(p.n / kRows) * (p.k / kNibbleColumns);
  return launch_pdl(write_out_kernel<T>, dim3(static_cast<unsigned>(ceil_div(tiles, kWritten / 128))), dim3(kWritten),
                    stream, p, out);
}

}  // namespace lamina
