// csrc/paged_attention/hopper_kernel.cuh on a host, in bfloat16: prefill, by fixed splits or not, and decoding.
#include "hopper_attention.cuh"

namespace lamina {

alignas(1024) uint4 memory[host::kMemory / sizeof(uint4)];

}  // namespace lamina

#include "paged_attention/arguments.cuh"
#include "paged_attention/hopper_kernel.cuh"

namespace lamina {

// As hopper_launch.cuh makes them.
template <typename S>
void make_maps(const PagedAttentionArguments& p, typename S::Parameters& a) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  a.block_mask = static_cast<int>(p.block_size - 1), a.block_shift = 0;
  while (p.block_size >> a.block_shift > 1) ++a.block_shift;
  a.tile_counter = a.call.arrivals + a.call.num_tiles * a.call.num_kv_heads;
  a.query_map = {reinterpret_cast<const void*>(p.query),
                 {p.head_dim, group, p.num_kv_heads, p.num_tokens},
                 {1, p.query_head, p.query_head * group, p.query_token},
                 {kPanelColumns, static_cast<int>(group), 1, S::kRows / static_cast<int>(group)}};
  const auto map_cache = [&](int64_t data, int64_t block, int64_t token, int64_t head) {
    return CUtensorMap{reinterpret_cast<const void*>(data),
                       {p.head_dim, p.num_kv_heads, p.block_size, p.num_blocks},
                       {1, head, token, block},
                       {kPanelColumns, 1, S::kBoxKeys, 1}};
  };
  a.key_map = map_cache(p.key_cache, p.key_block, p.key_token, p.key_head);
  a.value_map = map_cache(p.value_cache, p.value_block, p.value_token, p.value_head);
}

// What the kernel ahead writes: other bits while it runs, and nobody else may write there.
struct Region {
  char* data;
  int64_t bytes;
};
using Regions = std::vector<Region>;

// Runs a block while the kernel ahead does.
template <typename S>
void run_block(const typename S::Parameters& a, unsigned block, const Regions& ahead) {
  std::vector<std::string> written;
  for (const auto& [data, bytes] : ahead) {
    written.emplace_back(data, bytes);
    std::memset(data, 0xff, bytes);
  }
  const auto write = [&] {
    for (size_t i = 0; i < ahead.size(); ++i) std::memcpy(ahead[i].data, written[i].data(), ahead[i].bytes);
  };
  if (!ahead.empty()) host::predecessor = write;
  host::run_cluster(block, 1, S::kThreads, S::kSharedBytes, [&] { hopper_attention_kernel<S>(a); });
  if (!host::predecessor) return;
  host::check(block != 0, "the first block ends before the kernel ahead");
  std::exchange(host::predecessor, nullptr)();
}

template <typename S>
void launch(const FixedSplitArguments& p, const Regions& ahead) {
  const PagedAttentionArguments& call = p.rotating.attention;
  typename S::Parameters a;
  if constexpr (S::kRotates)
    a.call = unpack<typename S::Call>(p.rotating);
  else
    a.call = unpack<typename S::Call>(call);
  a.fixed = {narrow(p.keys), narrow(p.whole_keys), narrow(p.num_slots), narrow(p.partial_rows)};
  make_maps<S>(call, a);
  const auto blocks =
      static_cast<unsigned>(min(call.device_blocks, call.num_tiles * call.num_kv_heads * call.num_splits));
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), host::generator);
  gridDim.x = blocks;
  for (const unsigned block : order)
    if (host::failure.empty()) run_block<S>(a, block, ahead);
}

template <typename Function>
int with_shape(int64_t kind, int64_t head_dim, const Function& function) {
  const int64_t which = kind * 1000 + head_dim;
  if (which == 3064) return function(HopperShape<Bf16, Bf16, 64, true>{});
  if (which == 3128) return function(HopperShape<Bf16, Bf16, 128, true>{});
  if (which == 4064) return function(HopperDecodeShape<Bf16, 64, false>{});
  if (which == 4128) return function(HopperDecodeShape<Bf16, 128, false>{});
  if (which == 5064) return function(HopperDecodeShape<Bf16, 64, true>{});
  if (which == 5128) return function(HopperDecodeShape<Bf16, 128, true>{});
  if (which == 6128) return function(HopperShape<Bf16, Bf16, 128>{});  // without fixed splits
  return 1;
}

}  // namespace lamina

extern "C" int64_t arguments_size() { return sizeof(FixedSplitArguments); }

// What went wrong; empty where nothing did. Threads take turns, copies arrive, and the kernel ahead ends, as the seed
// says.
extern "C" const char* run(const FixedSplitArguments* p, int64_t seed, const lamina::Region* ahead, int64_t count) {
  host::only_array = reinterpret_cast<char*>(lamina::memory);
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(seed)), host::num_early = 0;
  const PagedAttentionArguments& call = p->rotating.attention;
  lamina::with_shape(call.kind, call.head_dim, [&](auto shape) {
    lamina::launch<decltype(shape)>(*p, {ahead, ahead + count});
    return 0;
  });
  return host::failure.c_str();
}

// Copies of the last run that began before the kernel ahead had ended.
extern "C" int64_t early_copies() { return host::num_early; }

// What plans ask of a kernel.
extern "C" int shape_of(int64_t kind, int64_t head_dim, int64_t* rows, int64_t* partial_floats) {
  return lamina::with_shape(kind, head_dim, [&](auto shape) {
    *rows = decltype(shape)::kRows, *partial_floats = decltype(shape)::kPartialFloats;
    return 0;
  });
}
