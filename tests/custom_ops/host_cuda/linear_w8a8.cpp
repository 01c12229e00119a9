// csrc/linear_w8a8/gemm.cuh, and csrc/include/split_k_gemm.cuh in one byte, on a host.
#include "cluster.cuh"

struct __half;
namespace lamina {
uint8_t shared[1];  // of which the place alone is asked for
}
#include "gemm.cuh"

struct Arguments {
  const Bf16* x;
  const uint8_t* weight;
  const float* scale;
  const Bf16* bias;
  Bf16* out;
  int64_t tokens, n, k, x_stride, groups, warpgroups, split_k, stages, is_whole, seed, shares_peaks, paces;
};

template <typename Format, int kWarpgroups, bool kShares>
void run_all(const Arguments& a) {
  using S = lamina::QuantizingShape<Format, kWarpgroups, kShares>;
  lamina::QuantizingLinear<Format, Bf16> p{};
  p.x = a.x, p.x_stride = a.x_stride, p.weight_scale = a.scale, p.groups = static_cast<int>(a.groups);
  p.bias = a.bias, p.out = a.out;
  p.tokens = static_cast<int>(a.tokens), p.n = static_cast<int>(a.n), p.k = static_cast<int>(a.k);
  p.split_k = static_cast<int>(a.split_k), p.stages = static_cast<int>(a.stages);
  p.paces = a.paces != 0;
  const CUtensorMap weight{a.weight, {a.k, a.n, 1, 1}, {1, a.k, 0, 0}, {128, 64, 1, 1}, 1};
  const auto cluster = static_cast<unsigned>(p.split_k);
  gridDim.x = static_cast<unsigned>((p.n + S::kBlockRows - 1) / S::kBlockRows) * cluster;
  const auto bytes = static_cast<uint32_t>(S::bytes(p.stages, S::tiles(p.k, p.split_k)));
  for (host::block_row = 0; host::block_row * 8 < static_cast<unsigned>(p.tokens); ++host::block_row)
    for (unsigned block = 0; block < gridDim.x && host::failure.empty(); block += cluster)
      host::run_cluster(block, p.split_k, S::kThreads + lamina::kWarp, bytes,
                        [&] { lamina::quantizing_gemm_kernel<S, kWarpgroups>(weight, p); });
}

template <typename Format>
void run_format(const Arguments& a) {
  if (a.shares_peaks)
    a.warpgroups == 1 ? run_all<Format, 1, true>(a) : run_all<Format, 2, true>(a);
  else
    a.warpgroups == 1 ? run_all<Format, 1, false>(a) : run_all<Format, 2, false>(a);
}

// What went wrong; empty where nothing did.
extern "C" const char* run(const Arguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  a->is_whole ? run_format<lamina::Int8>(*a) : run_format<lamina::Float8>(*a);
  return host::failure.c_str();
}

// Gate and up of mlp_w8a8, by the split-K GEMM.
struct GatedArguments {
  const uint8_t *x, *weight;
  const float *x_scale, *scale;
  const Bf16* bias;
  Bf16* out;
  int64_t tokens, n, k, token_stride, group_stride, groups, tile_tokens, multicast, split_k, stages, is_whole, seed,
      promises_x;
  lamina::AdaptersBehind behind;
  int64_t num_slots;
};

template <typename Format, int kTokens>
void run_gate(const GatedArguments& a) {
  using S = lamina::SplitKShape<Format, 2, kTokens>;
  lamina::Linear<Format, Bf16> p{};
  p.x_scale = a.x_scale, p.weight_scale = a.scale, p.groups = static_cast<int>(a.groups);
  p.token_stride = static_cast<int>(a.token_stride), p.group_stride = static_cast<int>(a.group_stride);
  p.bias = a.bias, p.out = a.out;
  p.tokens = static_cast<int>(a.tokens), p.n = static_cast<int>(a.n), p.k = static_cast<int>(a.k);
  p.multicast = static_cast<int>(a.multicast), p.split_k = static_cast<int>(a.split_k);
  p.stages = static_cast<int>(a.stages);
  p.promises_x = a.promises_x != 0, p.behind = a.behind;
  p.box_rows = 8 * ((min(p.tokens, kTokens) + 8 * p.multicast - 1) / (8 * p.multicast));
  const CUtensorMap weight{a.weight, {a.k, a.n, 1, 1}, {1, a.k, 0, 0}, {128, 64, 1, 1}, 1};
  const CUtensorMap x{a.x, {a.k, a.tokens, 1, 1}, {1, a.k, 0, 0}, {128, p.box_rows, 1, 1}, 1};
  const int tile = S::kBlockRows / 2 * p.multicast;
  const auto cluster = static_cast<unsigned>(p.multicast * p.split_k);
  gridDim.x = static_cast<unsigned>((p.n / 2 + tile - 1) / tile) * cluster;
  gridDim.y = static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens);
  const auto bytes = static_cast<uint32_t>(S::bytes(p.stages));
  for (host::block_row = 0; host::block_row * kTokens < static_cast<unsigned>(p.tokens); ++host::block_row)
    for (unsigned block = 0; block < gridDim.x && host::failure.empty(); block += cluster)
      (p.promises_x ? host::run_promising_cluster : host::run_cluster)(
          block, static_cast<int>(cluster), S::kThreads + lamina::kWarp, bytes,
          [&] { lamina::split_k_gemm_kernel<Format, Bf16, 2, kTokens, true>(weight, x, p); });
}

template <typename Format>
void run_gate_of(const GatedArguments& a) {
  if (a.tile_tokens == 8) run_gate<Format, 8>(a);
  if (a.tile_tokens == 32) run_gate<Format, 32>(a);
  if (a.tile_tokens == 64) run_gate<Format, 64>(a);
}

// Of each slot that a token has every byte was asked for once, and of the others none.
void check_prefetched(const GatedArguments& a) {
  const auto& behind = a.behind;
  if (behind.slots == nullptr)
    return host::check(host::prefetched.empty(), "adapters are asked for that are not there");
  const std::set<int32_t> used(behind.slots, behind.slots + a.tokens);
  int64_t wanted = 0;
  for (const int32_t slot : used) wanted += slot < 0 ? 0 : behind.a_bytes + behind.b_bytes;
  for (const auto& [place, count] : host::prefetched) {
    const auto of_a = place - reinterpret_cast<const char*>(behind.a),
               of_b = place - reinterpret_cast<const char*>(behind.b);
    const bool is_a = of_a >= 0 && of_a < a.num_slots * behind.a_bytes;
    const auto slot = static_cast<int32_t>(is_a ? of_a / behind.a_bytes : of_b / behind.b_bytes);
    host::check(count == 1 && (is_a || of_b >= 0) && used.count(slot) == 1,
                "what is asked for is of no token, or twice");
  }
  host::check(static_cast<int64_t>(host::prefetched.size()) == wanted, "not all of the adapters is asked for");
}

extern "C" const char* gate(const GatedArguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  host::prefetched.clear();
  a->is_whole ? run_gate_of<lamina::Int8>(*a) : run_gate_of<lamina::Float8>(*a);
  check_prefetched(*a);
  return host::failure.c_str();
}

// out[i] = x[i] / scale[i], as values are quantized.
extern "C" void divide(const float* x, const float* scale, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = lamina::Divider(scale[i]).divide(x[i]);
}
