// The host's part of the launch on Hopper: TMA tensor maps of queries, keys and values.
#pragma once

#include "arguments.cuh"
#include "hopper_kernel.cuh"
#include "tensor_map.cuh"

namespace lamina {

// a.call is there already.
template <typename S>
cudaError_t prepare(const PagedAttentionArguments& p, typename S::Parameters& a) {
  using T = typename S::T;
  const int64_t group = a.call.group;
  a.block_mask = static_cast<int>(p.block_size - 1);
  a.block_shift = 0;
  while (p.block_size >> a.block_shift > 1) ++a.block_shift;
  a.tile_counter = a.call.arrivals + a.call.num_tiles * a.call.num_kv_heads;
  const Boxes<4> query{{p.head_dim, group, p.num_kv_heads, p.num_tokens},
                       {p.query_head, p.query_head * group, p.query_token},
                       {kPanelColumns, group, 1, S::kRows / group}};
  const auto encode_cache = [&](CUtensorMap* map, int64_t data, int64_t block, int64_t token, int64_t head) {
    const Boxes<4> boxes{{p.head_dim, p.num_kv_heads, p.block_size, p.num_blocks},
                         {head, token, block},
                         {S::kConverts ? S::kDim : kPanelColumns, 1, S::kBoxKeys, 1}};
    const auto swizzle = S::kConverts ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
    return encode_tensor_map<typename S::Cached>(map, reinterpret_cast<const void*>(data), boxes, swizzle);
  };
  cudaError_t error = cudaSuccess;
  if constexpr (!S::kDecodes) error = encode_tensor_map<T>(&a.query_map, reinterpret_cast<const void*>(p.query), query);
  if (error == cudaSuccess) error = encode_cache(&a.key_map, p.key_cache, p.key_block, p.key_token, p.key_head);
  if (error == cudaSuccess)
    error = encode_cache(&a.value_map, p.value_cache, p.value_block, p.value_token, p.value_head);
  return error;
}

}  // namespace lamina
