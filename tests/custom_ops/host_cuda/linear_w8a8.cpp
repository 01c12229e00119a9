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
  int64_t tokens, n, k, x_stride, groups, warpgroups, split_k, stages, is_whole, seed;
};

template <typename Format, int kWarpgroups>
void run_all(const Arguments& a) {
  using S = lamina::QuantizingShape<Format, kWarpgroups>;
  lamina::QuantizingLinear<Format, Bf16> p{};
  p.x = a.x, p.x_stride = a.x_stride, p.weight_scale = a.scale, p.groups = static_cast<int>(a.groups);
  p.bias = a.bias, p.out = a.out;
  p.tokens = static_cast<int>(a.tokens), p.n = static_cast<int>(a.n), p.k = static_cast<int>(a.k);
  p.split_k = static_cast<int>(a.split_k), p.stages = static_cast<int>(a.stages);
  const CUtensorMap weight{a.weight, {a.k, a.n, 1, 1}, {1, a.k, 0, 0}, {128, 64, 1, 1}, 1};
  const auto cluster = static_cast<unsigned>(p.split_k);
  gridDim.x = static_cast<unsigned>((p.n + S::kBlockRows - 1) / S::kBlockRows) * cluster;
  const auto bytes = static_cast<uint32_t>(S::bytes(p.stages, S::tiles(p.k, p.split_k)));
  for (host::block_row = 0; host::block_row * 8 < static_cast<unsigned>(p.tokens); ++host::block_row)
    for (unsigned block = 0; block < gridDim.x && host::failure.empty(); block += cluster)
      host::run_cluster(block, p.split_k, S::kThreads + lamina::kWarp, bytes,
                        [&] { lamina::quantizing_gemm_kernel<Format, Bf16, kWarpgroups>(weight, p); });
}

// What went wrong; empty where nothing did.
extern "C" const char* run(const Arguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  if (a->is_whole)
    a->warpgroups == 1 ? run_all<lamina::Int8, 1>(*a) : run_all<lamina::Int8, 2>(*a);
  else
    a->warpgroups == 1 ? run_all<lamina::Float8, 1>(*a) : run_all<lamina::Float8, 2>(*a);
  return host::failure.c_str();
}
