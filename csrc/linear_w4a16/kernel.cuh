// out = x * wᵀ + bias with weights of kBits, four or eight, or with gate and up among them silu(gate) * up; and the
// weights written out, for a GEMM of many rows.
#pragma once

#include "gemm.cuh"
#include "split_k_launch.cuh"
#include "write_out.cuh"

namespace lamina {

template <typename S, bool kGated, typename T>
int launch_nibble_gemm(LinearW4A16<T> p, const void* x_data, int64_t x_stride, cudaStream_t stream) {
  CUtensorMap x;
  const auto kernel = nibble_gemm_kernel<S, kGated, T>;
  p.scale_bytes = S::scale_bytes(p.group_shift);
  p.box_rows = 8 * narrow(ceil_div(smaller(p.tokens, S::kTokenRows), 8 * p.multicast));
  cudaError_t error = make_matrix_map<T>(&x, x_data, p.tokens, p.k, x_stride, p.box_rows);
  if (error == cudaSuccess) error = allow_all_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int64_t tile_width = kGated ? S::kBlockRows / 2 : S::kBlockRows, width = kGated ? p.n / 2 : p.n;
  const auto cluster = static_cast<unsigned>(p.multicast * p.split_k);
  const dim3 grid(static_cast<unsigned>(ceil_div(width, tile_width * p.multicast)) * cluster,
                  static_cast<unsigned>(ceil_div(p.tokens, S::kTokenRows)));
  const int bytes = S::bytes(p.stages, p.scale_bytes, p.zero != nullptr);
  return launch_clusters_pdl(cluster, kernel, grid, dim3(S::kThreads + kWarp), bytes, stream, x, p);
}

template <int kBits, typename T>
int write_out(const LinearW4A16<T>& p, T* out, cudaStream_t stream) {
  const int64_t tiles = static_cast<int64_t>(p.n / kRows) * (p.k / kNibbleColumns);
  if (tiles == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(tiles, kWriters / 128)));
  return launch_pdl(write_out_kernel<kBits, T>, grid, dim3(kWriters), stream, p, out);
}

// What a configuration's clusters say here, where no kernel is persistent: a sum of these.
constexpr int kByWarps = 1;  // products by mma.sync
constexpr int kPlain = 2;    // by the kernel for groups of 128 columns without zero points
constexpr int kPaces = 4;    // the first weights are loaded at a pace

// Calls launch(shape) for the wanted one of the shapes that are compiled. Four warpgroups are of use where the tiles of
// x weigh as much as theirs.
template <int kBits, bool kGated, Groups kGroups, int... tokens, typename Launch>
int with_nibble_shape(const GemmConfig& config, const Launch& launch) {
  const auto with_shape = [&](auto warpgroups, auto rows, auto by_warps) {
    constexpr bool kPaired = !kGated || warpgroups.value % 2 == 0;
    constexpr bool kUseful = warpgroups.value < 4 || rows.value == 32 || rows.value == 64;
    if constexpr (kPaired && kUseful)
      return launch(NibbleShape<warpgroups.value, rows.value, by_warps.value, kBits, kGroups>{});
    return static_cast<int>(cudaErrorInvalidValue);
  };
  if (config.clusters & kByWarps) {
    return with_constant<1, 2>(config.warpgroups, [&](auto warpgroups) {
      return with_constant<8, 16, 32>(config.tile_tokens,
                                      [&](auto rows) { return with_shape(warpgroups, rows, std::true_type{}); });
    });
  }
  return with_constant<1, 2, 4>(config.warpgroups, [&](auto warpgroups) {
    return with_constant<tokens...>(config.tile_tokens,
                                    [&](auto rows) { return with_shape(warpgroups, rows, std::false_type{}); });
  });
}

template <int kBits, bool kGated, typename T>
int linear_w4a16(const LinearW4A16<T>& p, const void* x, int64_t x_stride, const GemmConfig& config,
                 cudaStream_t stream) {
  if (!is_even(config) || config.clusters > kByWarps + kPlain + kPaces) return cudaErrorInvalidValue;
  const auto launch = [&](auto shape) { return launch_nibble_gemm<decltype(shape), kGated>(p, x, x_stride, stream); };
  if ((config.clusters & kPlain) == 0)
    return with_nibble_shape<kBits, kGated, Groups::kAny, 8, 16, 32, 64, 128>(config, launch);
  if constexpr (kBits == 4) {  // by WGMMA from 32 rows on: of fewer, ptxas would have each wait for the one before
    if (p.zero == nullptr && p.group_shift == kPlainShift)
      return with_nibble_shape<kBits, kGated, Groups::kPlain128, 32, 64, 128>(config, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace lamina
