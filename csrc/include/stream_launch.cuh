// The launch of a streaming product: tensor maps, and constants for what a caller chooses.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "stream_linear.cuh"

namespace lamina {

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode find_encode() {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<Encode>(symbol);
}

inline CUtensorMapDataType map_type(__nv_bfloat16) { return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; }
inline CUtensorMapDataType map_type(__half) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }

// In the swizzle that the products read; what lies outside is read as zeros.
template <typename T>
inline bool encode_map(CUtensorMap* map, const void* data, cuuint32_t dimensions, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps) {
  static const Encode encode = find_encode();
  return encode != nullptr &&
         encode(map, map_type(T{}), dimensions, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Boxes of 64 columns and box_rows rows.
template <typename T>
inline bool describe(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * sizeof(T)};
  const cuuint32_t box[2] = {kColumns, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  return encode_map<T>(map, data, 2, sizes, strides, box, steps);
}

// What a caller chooses: how a product is cut into blocks.
struct Cut {
  int64_t groups, tokens, share, split, stages;
  int64_t clusters;  // that stay and take tile after tile; 0: a cluster for each tile
};

// Calls function with the one of the constants that is wanted.
template <int... constants, typename Function>
inline int with_constant(int64_t wanted, const Function& function) {
  int error = cudaErrorInvalidValue;
  ((wanted == constants ? (error = function(std::integral_constant<int, constants>{})) : 0), ...);
  return error;
}

// Calls function with groups and tokens as constants. Four groups are of use where the tiles of x weigh as much as
// theirs, and need registers for their sums.
template <bool kGated, int... tokens, typename Function>
inline int with_cut(const Cut& cut, const Function& function) {
  const bool parts = cut.share >= 1 && cut.split >= 1 && cut.tokens % (cut.share * 8) == 0;  // 8 rows: a swizzle
  if (!parts || cut.stages < 2 || cut.stages > kMaxStages) return cudaErrorInvalidValue;
  return with_constant<1, 2, 4>(cut.groups, [&](auto groups) {
    return with_constant<tokens...>(cut.tokens, [&](auto columns) {
      constexpr bool kPaired = !kGated || groups.value % 2 == 0;
      constexpr bool kUseful = groups.value < 4 || columns.value == 64 || columns.value == 128;
      if constexpr (kPaired && kUseful) return function(groups, columns);
      return static_cast<int>(cudaErrorInvalidValue);
    });
  });
}

// Calls function with a value of the type that the code stands for, of those that the matrix units take here.
template <typename Function>
inline int with_dtype16(int64_t code, const Function& function) {
  if (code == 1) return function(__nv_bfloat16{});
  if (code == 2) return function(__half{});
  return cudaErrorInvalidValue;
}

template <typename T, int kGroups, int kTokens, bool kGated>
int launch_linear(Linear<T> p, const void* weight_data, const void* x_data, int64_t x_stride, cudaStream_t stream) {
  using S = Shape<kGroups, kTokens>;
  CUtensorMap weight, x;
  if (!describe<T>(&weight, weight_data, p.n, p.k, p.k, kRows)) return cudaErrorInvalidValue;
  p.copied = 8 * narrow(ceil_div(smaller(p.tokens, kTokens), 8 * p.share));
  if (!describe<T>(&x, x_data, p.tokens, p.k, x_stride, p.copied)) return cudaErrorInvalidValue;
  const auto kernel = linear_kernel<T, kGroups, kTokens, kGated>;
  const int bytes = S::bytes(p.stages);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t tile_width = kGated ? S::kBlockRows / 2 : S::kBlockRows, width = kGated ? p.n / 2 : p.n;
  const auto cluster = static_cast<unsigned>(p.share * p.split);
  const dim3 grid(static_cast<unsigned>(ceil_div(width, tile_width * p.share)) * cluster,
                  static_cast<unsigned>(ceil_div(p.tokens, kTokens)));
  return launch_clusters_early(cluster, kernel, grid, dim3(S::kThreads + kWarp), bytes, stream, weight, x, p);
}

}  // namespace lamina
