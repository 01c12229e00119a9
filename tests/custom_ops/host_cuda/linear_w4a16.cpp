// csrc/linear_w4a16/gemm.cuh on a host.
#include "cluster.cuh"

struct __half;
namespace lamina {
uint8_t shared[1];  // of which the place alone is asked for
}
#include "gemm.cuh"
#include "write_out.cuh"

struct Arguments {
  const uint16_t* x;
  const uint8_t* weight;
  const Bf16 *scale, *zero, *bias;
  Bf16* out;
  int64_t tokens, n, k, x_stride, groups, group_shift, warpgroups, tile_tokens, multicast, split_k, stages, is_gated,
      seed, clusters, bits;
};

using lamina::Groups;

template <int kBits, int kWarpgroups, int kTokens, bool kGated, bool kByWarps = false, Groups kGroups = Groups::kAny>
void run_all(const Arguments& a) {
  using S = lamina::NibbleShape<kWarpgroups, kTokens, kByWarps, kBits, kGroups>;
  lamina::LinearW4A16<Bf16> p{};
  p.bias = a.bias, p.out = a.out, p.weight = a.weight, p.scale = a.scale, p.zero = a.zero;
  p.tokens = static_cast<int>(a.tokens), p.n = static_cast<int>(a.n), p.k = static_cast<int>(a.k);
  p.multicast = static_cast<int>(a.multicast), p.split_k = static_cast<int>(a.split_k);
  p.stages = static_cast<int>(a.stages), p.groups = static_cast<int>(a.groups);
  p.group_shift = static_cast<int>(a.group_shift), p.scale_bytes = S::scale_bytes(p.group_shift);
  p.paces = (a.clusters & 4) != 0;
  const int sections = (min(p.tokens, kTokens) + 8 * p.multicast - 1) / (8 * p.multicast);
  p.box_rows = 8 * sections;
  const CUtensorMap x{a.x, {a.k, a.tokens, 1, 1}, {1, a.x_stride, 0, 0}, {64, p.box_rows, 1, 1}};
  const int width = kGated ? p.n / 2 : p.n, tile = (kGated ? S::kBlockRows / 2 : S::kBlockRows) * p.multicast;
  const unsigned cluster = static_cast<unsigned>(p.multicast * p.split_k);
  gridDim.x = static_cast<unsigned>((width + tile - 1) / tile) * cluster;
  const auto bytes = static_cast<uint32_t>(S::bytes(p.stages, p.scale_bytes, p.zero != nullptr));
  for (host::block_row = 0; host::block_row * kTokens < static_cast<unsigned>(p.tokens); ++host::block_row)
    for (unsigned block = 0; block < gridDim.x && host::failure.empty(); block += cluster)
      host::run_cluster(block, static_cast<int>(cluster), S::kThreads + lamina::kWarp, bytes,
                        [&] { lamina::nibble_gemm_kernel<S, kGated>(x, p); });
}

template <int kBits, int kWarpgroups>
int bytes_of(int64_t tokens, int group_shift, int stages, bool has_zero) {
  const auto count = [&](auto shape) {
    using S = decltype(shape);
    return S::bytes(stages, S::scale_bytes(group_shift), has_zero);
  };
  if (tokens == 8) return count(lamina::NibbleShape<kWarpgroups, 8, false, kBits>{});
  if (tokens == 16) return count(lamina::NibbleShape<kWarpgroups, 16, false, kBits>{});
  if (tokens == 32) return count(lamina::NibbleShape<kWarpgroups, 32, false, kBits>{});
  if (tokens == 64) return count(lamina::NibbleShape<kWarpgroups, 64, false, kBits>{});
  return count(lamina::NibbleShape<kWarpgroups, 128, false, kBits>{});
}

template <int kBits>
int bytes_of(int warpgroups, int64_t tokens, int group_shift, int stages, bool has_zero) {
  if (warpgroups == 1) return bytes_of<kBits, 1>(tokens, group_shift, stages, has_zero);
  if (warpgroups == 2) return bytes_of<kBits, 2>(tokens, group_shift, stages, has_zero);
  return bytes_of<kBits, 4>(tokens, group_shift, stages, has_zero);
}

// What a block takes of dynamic shared memory.
extern "C" int shared_bytes(int bits, int warpgroups, int64_t tokens, int group_shift, int stages, int has_zero) {
  return bits == 4 ? bytes_of<4>(warpgroups, tokens, group_shift, stages, has_zero != 0)
                   : bytes_of<8>(warpgroups, tokens, group_shift, stages, has_zero != 0);
}

// The weights written out.
extern "C" const char* write_out(const Arguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  lamina::LinearW4A16<Bf16> p{};
  p.weight = a->weight, p.scale = a->scale, p.zero = a->zero;
  p.n = static_cast<int>(a->n), p.k = static_cast<int>(a->k);
  p.groups = static_cast<int>(a->groups), p.group_shift = static_cast<int>(a->group_shift);
  const unsigned blocks = static_cast<unsigned>((a->n / 64 * (a->k / 64) + 1) / 2);
  for (unsigned block = 0; block < blocks && host::failure.empty(); ++block)
    host::run_cluster(block, 1, lamina::kWriters, 0, [&] {
      a->bits == 4 ? lamina::write_out_kernel<4>(p, a->out) : lamina::write_out_kernel<8>(p, a->out);
    });
  return host::failure.c_str();
}

template <int kBits>
void run_shape(const Arguments& a) {
  const int64_t shape = (a.warpgroups * 1000 + a.tile_tokens) * 10 + a.is_gated;
  if (a.clusters & 2) {  // for groups of 128 columns without zero points
    if (shape == 10080) run_all<4, 1, 8, false, true, Groups::kPlain128>(a);
    if (shape == 20081) run_all<4, 2, 8, true, true, Groups::kPlain128>(a);
    if (shape == 20321) run_all<4, 2, 32, true, false, Groups::kPlain128>(a);
    if (shape == 10640) run_all<4, 1, 64, false, false, Groups::kPlain128>(a);
    return;
  }
  if (a.clusters & 1) {
    if (shape == 10080) run_all<kBits, 1, 8, false, true>(a);
    if (shape == 20081) run_all<kBits, 2, 8, true, true>(a);
    if (shape == 20160) run_all<kBits, 2, 16, false, true>(a);
    if (shape == 10320) run_all<kBits, 1, 32, false, true>(a);
    return;
  }
  if (shape == 10080) run_all<kBits, 1, 8, false>(a);
  if (shape == 20080) run_all<kBits, 2, 8, false>(a);
  if (shape == 20081) run_all<kBits, 2, 8, true>(a);
  if (shape == 10160) run_all<kBits, 1, 16, false>(a);
  if (shape == 20321) run_all<kBits, 2, 32, true>(a);
  if (shape == 10320) run_all<kBits, 1, 32, false>(a);
  if (shape == 10640) run_all<kBits, 1, 64, false>(a);
  if (shape == 20641) run_all<kBits, 2, 64, true>(a);
  if (shape == 40320) run_all<kBits, 4, 32, false>(a);
}

// Of how many scales in bfloat16 some plain weight has other bits than one that is made for any groups. A weight is
// exact from 2^-94 on; those of a scale of zero are zeros.
extern "C" int64_t count_other_weights() {
  int64_t count = 0;
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const float scale = lamina::half_of(bits, 0), size = std::fabs(scale);
    if (!(size < 0x1p27f) || (size < 0x1p-94f && size > 0)) continue;
    const lamina::RowScales plain = lamina::find_plain_scales<Bf16>(bits * 0x10001);
    const lamina::RowScales rows{{bits * 0x10001, bits * 0x10001}, {0, 0}};
    bool is_other = false;
    for (const uint32_t word : {0x76543210u, 0xfedcba98u, 0x67452301u, 0xefcdab89u}) {
      uint32_t made[4], wanted[4];
      lamina::dequantize_plain<Bf16>(made, word, plain);
      lamina::dequantize<4, Bf16>(wanted, &word, rows);
      for (int i = 0; i < 8; ++i)
        is_other |=
            lamina::half_of(made[i / 2], i % 2) * lamina::kPlainFactor<Bf16> != lamina::half_of(wanted[i / 2], i % 2);
    }
    count += is_other;
  }
  return count;
}

// What went wrong; empty where nothing did.
extern "C" const char* run(const Arguments* a) {
  host::failure.clear(), host::generator.seed(static_cast<unsigned>(a->seed));
  a->bits == 4 ? run_shape<4>(*a) : run_shape<8>(*a);
  return host::failure.c_str();
}
