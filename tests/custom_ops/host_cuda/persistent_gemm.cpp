// csrc/include/persistent_gemm.cuh on a host.
#include "persistent_gemm.cuh"

namespace lamina {
uint8_t shared[1];  // of which the place alone is asked for
}

struct Arguments {
  const void *x, *weight;
  const Bf16* bias;
  Bf16* out;
  int64_t tokens, n, k, x_stride, warpgroups, section, multicast, split_k, clusters, is_gated, seed;
  const float *x_scale, *scale;  // of operands in one byte
  int64_t token_stride, group_stride, groups, is_whole, splits_all, promises_x;
};

template <typename S, bool kGated>
void run_shape(lamina::Linear<typename S::In, Bf16> p, const Arguments& a) {
  constexpr int kColumns = lamina::kTileColumns<typename S::In>, kBytes = sizeof(typename S::In);
  p.bias = a.bias, p.out = a.out, p.splits_all = a.splits_all != 0, p.promises_x = a.promises_x != 0;
  p.tokens = static_cast<int>(a.tokens), p.n = static_cast<int>(a.n), p.k = static_cast<int>(a.k);
  p.box_rows = lamina::rows_to_copy<S>(p.tokens);
  CUtensorMap weight{a.weight, {a.k, a.n, 1, 1}, {1, a.k, 0, 0}, {kColumns, 64, 1, 1}, kBytes};
  if (kGated) weight = {a.weight, {a.k, 8, 2, a.n / 16}, {1, a.k, a.n / 2 * a.k, 8 * a.k}, {kColumns, 8, 2, 4}};
  const CUtensorMap x{a.x, {a.k, a.tokens, 1, 1}, {1, a.x_stride, 0, 0}, {kColumns, p.box_rows, 1, 1}, kBytes};
  gridDim.x = static_cast<unsigned>(a.clusters) * S::kCluster;
  for (unsigned block = 0; block < gridDim.x && host::failure.empty(); block += S::kCluster)
    (p.promises_x ? host::run_promising_cluster : host::run_cluster)(
        block, S::kCluster, S::kAllThreads, S::kBytes,
        [&] { lamina::persistent_gemm_kernel<S, kGated>(weight, x, p); });
}

template <int kWarpgroups, int kTokens, int kMulticastBlocks, int kSplits, bool kGated>
void run_all(const Arguments& a) {
  run_shape<lamina::PersistentShape<Bf16, kWarpgroups, kTokens, kMulticastBlocks, kSplits>, kGated>({}, a);
}

template <typename Format, int kWarpgroups, int kTokens, int kMulticastBlocks, int kSplits>
void run_scaled(const Arguments& a) {
  lamina::Linear<Format, Bf16> p{};
  p.x_scale = a.x_scale, p.weight_scale = a.scale, p.groups = static_cast<int>(a.groups);
  p.token_stride = static_cast<int>(a.token_stride), p.group_stride = static_cast<int>(a.group_stride);
  run_shape<lamina::PersistentShape<Format, kWarpgroups, kTokens, kMulticastBlocks, kSplits>, false>(p, a);
}

template <typename Format>
void run_bytes(const Arguments& a, int64_t shape) {
  if (shape == 1128120) run_scaled<Format, 1, 128, 1, 2>(a);
  if (shape == 2128120) run_scaled<Format, 2, 128, 1, 2>(a);
  if (shape == 2128210) run_scaled<Format, 2, 128, 2, 1>(a);
  if (shape == 2192120) run_scaled<Format, 2, 192, 1, 2>(a);
  if (shape == 2192210) run_scaled<Format, 2, 192, 2, 1>(a);
  if (shape == 2256210) run_scaled<Format, 2, 256, 2, 1>(a);
  if (shape == 2256120) run_scaled<Format, 2, 256, 1, 2>(a);
}

// What went wrong; empty where nothing did.
extern "C" const char* run(const Arguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  const int64_t shape = (a->warpgroups * 1000 + a->section) * 1000 + a->multicast * 100 + a->split_k * 10 + a->is_gated;
  if (a->scale != nullptr) {
    a->is_whole ? run_bytes<lamina::Int8>(*a, shape) : run_bytes<lamina::Float8>(*a, shape);
    return host::failure.c_str();
  }
  if (shape == 1128120) run_all<1, 128, 1, 2, false>(*a);
  if (shape == 1128121) run_all<1, 128, 1, 2, true>(*a);
  if (shape == 2128140) run_all<2, 128, 1, 4, false>(*a);
  if (shape == 2128220) run_all<2, 128, 2, 2, false>(*a);
  if (shape == 2128211) run_all<2, 128, 2, 1, true>(*a);
  if (shape == 2192210) run_all<2, 192, 2, 1, false>(*a);
  if (shape == 2192120) run_all<2, 192, 1, 2, false>(*a);
  if (shape == 2192121) run_all<2, 192, 1, 2, true>(*a);
  return host::failure.c_str();
}
