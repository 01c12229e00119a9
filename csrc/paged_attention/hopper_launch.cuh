// What the host prepares for the kernel of Hopper: how its copies find boxes of queries, keys and values.
#pragma once

#include "arguments.cuh"
#include "hopper_kernel.cuh"

namespace lamina {

// A tensor of four dimensions of which the first is contiguous, and a box of it.
struct BoxesOf {
  int64_t data;
  int64_t sizes[4];    // in elements, the contiguous dimension first
  int64_t strides[3];  // of the others, in elements
  int64_t box[4];
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's own function, which no library needs to be linked for; null where the driver has none.
inline EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                      : nullptr;
}

template <typename T>
cudaError_t encode(const BoxesOf& boxes, CUtensorMap& map) {
  static const EncodeTiled encoder = find_encoder();
  if (encoder == nullptr) return cudaErrorNotSupported;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4];
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) sizes[i] = static_cast<cuuint64_t>(boxes.sizes[i]);
  for (int i = 0; i < 3; ++i) strides[i] = static_cast<cuuint64_t>(boxes.strides[i]) * sizeof(T);
  for (int i = 0; i < 4; ++i) box[i] = static_cast<cuuint32_t>(boxes.box[i]);
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = encoder(&map, type, 4, reinterpret_cast<void*>(boxes.data), sizes, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename S>
cudaError_t prepare(const PagedAttentionArguments& p, HopperAttention<typename S::T>& a) {
  using T = typename S::T;
  a.call = unpack<T>(p);
  const int64_t group = a.call.group;
  a.block_mask = static_cast<int>(p.block_size - 1);
  a.block_shift = 0;
  while (p.block_size >> a.block_shift > 1) ++a.block_shift;
  a.tickets = a.call.arrivals + a.call.num_tiles * a.call.num_kv_heads;
  const BoxesOf query{p.query,
                      {p.head_dim, group, p.num_kv_heads, p.num_tokens},
                      {p.query_head, p.query_head * group, p.query_token},
                      {kPanelColumns, group, 1, S::kRows / group}};
  const auto cache = [&](int64_t data, int64_t block, int64_t token, int64_t head) {
    return BoxesOf{data,
                   {p.head_dim, p.num_kv_heads, p.block_size, p.num_blocks},
                   {head, token, block},
                   {kPanelColumns, 1, S::kBoxKeys, 1}};
  };
  cudaError_t error = encode<T>(query, a.query_map);
  if (error == cudaSuccess) error = encode<T>(cache(p.key_cache, p.key_block, p.key_token, p.key_head), a.key_map);
  if (error == cudaSuccess)
    error = encode<T>(cache(p.value_cache, p.value_block, p.value_token, p.value_head), a.value_map);
  return error;
}

}  // namespace lamina
