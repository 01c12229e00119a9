// csrc/include/persistent_gemm.cuh on a host.
#include "persistent_gemm.cuh"

namespace lamina {
uint8_t shared[1];  // of which the place alone is asked for
}

struct Arguments {
  const uint16_t *x, *weight;
  const Bf16* bias;
  Bf16* out;
  int64_t tokens, n, k, x_stride, warpgroups, section, multicast, split_k, clusters, is_gated, seed;
};

template <int kWarpgroups, int kTokens, int kMulticastBlocks, int kSplits, bool kGated>
void run_all(const Arguments& a) {
  using S = lamina::PersistentShape<kWarpgroups, kTokens, kMulticastBlocks, kSplits>;
  lamina::Linear<Bf16> p{};
  p.bias = a.bias, p.out = a.out;
  p.tokens = static_cast<int>(a.tokens), p.n = static_cast<int>(a.n), p.k = static_cast<int>(a.k);
  p.box_rows = lamina::rows_to_copy<S>(p.tokens);
  CUtensorMap weight{a.weight, {a.k, a.n, 1, 1}, {1, a.k, 0, 0}, {64, 64, 1, 1}};
  if (kGated) weight = {a.weight, {a.k, 8, 2, a.n / 16}, {1, a.k, a.n / 2 * a.k, 8 * a.k}, {64, 8, 2, 4}};
  const CUtensorMap x{a.x, {a.k, a.tokens, 1, 1}, {1, a.x_stride, 0, 0}, {64, p.box_rows, 1, 1}};
  gridDim.x = static_cast<unsigned>(a.clusters) * S::kCluster;
  for (unsigned block = 0; block < gridDim.x && host::failure.empty(); block += S::kCluster)
    host::run_cluster(block, S::kCluster, S::kAllThreads, S::kBytes,
                      [&] { lamina::persistent_gemm_kernel<Bf16, S, kGated>(weight, x, p); });
}

// What went wrong; empty where nothing did.
extern "C" const char* run(const Arguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  const int64_t shape = (a->warpgroups * 1000 + a->section) * 1000 + a->multicast * 100 + a->split_k * 10 + a->is_gated;
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
