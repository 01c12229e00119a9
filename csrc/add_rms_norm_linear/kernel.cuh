// The product and the gate of lamina::add_rms_norm_linear: out = silu(x * gateᵀ + bias) * (x * upᵀ + bias), where x is
// the norm, which a kernel of its own has made.
#pragma once

#include "resident_launch.cuh"

namespace lamina {

template <typename T>
int gated_linear(const Linear<T>& p, const void* weight, const void* x, int64_t x_stride, const Cut& cut,
                 cudaStream_t stream) {
  if (cut.clusters > 0) return resident_linear<T, true>(p, weight, x, x_stride, cut, stream);
  return with_cut<true, 8, 16, 32, 64, 128, 256>(cut, [&](auto groups, auto tokens) {
    return launch_linear<T, groups.value, tokens.value, true>(p, weight, x, x_stride, stream);
  });
}

}  // namespace lamina
