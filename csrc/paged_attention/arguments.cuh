// The packed arguments of one launch.
#pragma once

#include "tile_scheduler.cuh"

// As the caller packs them: 8 bytes each. Strides count elements; rows start at multiples of 16 bytes.
struct PagedAttentionArguments {
  int64_t out, out_token, out_head;
  int64_t query, query_token, query_head;
  int64_t key_cache, key_block, key_token, key_head;
  int64_t value_cache, value_block, value_token, value_head;
  int64_t block_tables, block_tables_stride, seq_lens, query_start_loc;
  int64_t num_tokens, num_blocks, num_seqs, num_heads, num_kv_heads, head_dim, block_size, window, chunk;
  int64_t partials, arrivals;
  int64_t device_blocks;  // that the device holds at once
  int64_t num_tiles, num_splits, fill_splits, num_extra, min_split_keys, max_split_keys, min_rows, max_rows;
  double scale, soft_cap, value_scale;
  int64_t dtype, kind, stream;
};

// The same for decode with rotation and cache write: that `query` is not rotated yet, keys and values of the step's
// tokens, their angles and slots. The stream is this one.
struct RotatingAttentionArguments {
  PagedAttentionArguments attention;
  int64_t key, key_token, key_head;
  int64_t value, value_token, value_head;
  int64_t cos, sin, slots;
  double key_scale;
  int64_t stream;
};

// The same with fixed splits (struct FixedSplits), rotating or not. The stream is this one.
struct FixedSplitArguments {
  RotatingAttentionArguments rotating;
  int64_t keys, whole_keys, num_slots, partial_rows;
  int64_t stream;
};

namespace lamina {

template <typename Call>
Call unpack(const PagedAttentionArguments& p) {
  using T = typename Call::T;
  using Cached = typename Call::Cached;
  constexpr int64_t kUnit = 16 / static_cast<int64_t>(sizeof(Cached));
  constexpr double kLog2E = 1.4426950408889634;
  const auto strides = [](int64_t block, int64_t token, int64_t head) {
    return Strides{static_cast<uint32_t>(block / kUnit), static_cast<uint32_t>(token / kUnit),
                   static_cast<uint32_t>(head / kUnit)};
  };
  const bool capped = p.soft_cap > 0;
  Call a;
  if constexpr (sizeof(Cached) == 1) a.value_scale = static_cast<float>(p.value_scale);
  a.out = reinterpret_cast<T*>(p.out);
  a.query = reinterpret_cast<const T*>(p.query);
  a.key_cache = reinterpret_cast<const uint4*>(p.key_cache);
  a.value_cache = reinterpret_cast<const uint4*>(p.value_cache);
  a.block_tables = reinterpret_cast<const int32_t*>(p.block_tables);
  a.seq_lens = reinterpret_cast<const int32_t*>(p.seq_lens);
  a.query_start_loc = reinterpret_cast<const int32_t*>(p.query_start_loc);
  a.partials = reinterpret_cast<float*>(p.partials);
  a.arrivals = reinterpret_cast<int32_t*>(p.arrivals);
  a.out_token = p.out_token, a.out_head = p.out_head;
  a.query_token = p.query_token, a.query_head = p.query_head;
  a.block_tables_stride = p.block_tables_stride;
  a.key_strides = strides(p.key_block, p.key_token, p.key_head);
  a.value_strides = strides(p.value_block, p.value_token, p.value_head);
  a.num_seqs = static_cast<int>(p.num_seqs);
  a.num_tiles = static_cast<int>(p.num_tiles), a.num_splits = static_cast<int>(p.num_splits);
  a.num_kv_heads = static_cast<int>(p.num_kv_heads);
  a.group = static_cast<int>(p.num_heads / p.num_kv_heads);
  a.head_dim = static_cast<int>(p.head_dim), a.block_size = static_cast<int>(p.block_size);
  a.window = static_cast<int>(p.window), a.chunk = static_cast<int>(p.chunk);
  a.scale = static_cast<float>(capped ? p.scale / p.soft_cap : p.scale * kLog2E);
  a.cap = static_cast<float>(p.soft_cap * kLog2E);
  a.fill_splits = static_cast<int>(p.fill_splits), a.num_extra = static_cast<int>(p.num_extra);
  a.min_split_keys = static_cast<int>(p.min_split_keys), a.max_split_keys = static_cast<int>(p.max_split_keys);
  a.min_rows = static_cast<int>(p.min_rows), a.max_rows = static_cast<int>(p.max_rows);
  return a;
}

template <typename Call>
Call unpack(const RotatingAttentionArguments& p) {
  using T = const typename Call::T;
  Call a = unpack<Call>(p.attention);
  const int64_t heads = p.attention.num_kv_heads;
  a.key = lamina::heads<T>(reinterpret_cast<T*>(p.key), heads, p.key_token, p.key_head);
  a.value = lamina::heads<T>(reinterpret_cast<T*>(p.value), heads, p.value_token, p.value_head);
  a.cos = reinterpret_cast<const float*>(p.cos), a.sin = reinterpret_cast<const float*>(p.sin);
  a.slots = reinterpret_cast<const int32_t*>(p.slots);
  a.num_tokens = narrow(p.attention.num_tokens);
  if constexpr (sizeof(typename Call::Cached) == 1) a.key_scale = static_cast<float>(p.key_scale);
  return a;
}

}  // namespace lamina
