// out = norm(x + residual) * weightᵀ + bias, or the gated activation of that.
#pragma once

#include "stream_launch.cuh"

namespace lamina {

template <typename T, bool kGated>
int norm_and_multiply(const Linear<T>& p, const void* weight, const Cut& cut, cudaStream_t stream) {
  return with_cut<kGated, 8, 16>(cut, [&](auto groups, auto tokens) {
    return launch_linear<T, groups.value, tokens.value, kGated, true>(p, weight, nullptr, 0, stream);
  });
}

// The norm has been made.
template <typename T>
int multiply_and_gate(const Linear<T>& p, const void* weight, const void* x, int64_t x_stride, const Cut& cut,
                      cudaStream_t stream) {
  return with_cut<true, 8, 16, 32, 64, 128, 256>(cut, [&](auto groups, auto tokens) {
    return launch_linear<T, groups.value, tokens.value, true, false>(p, weight, x, x_stride, stream);
  });
}

}  // namespace lamina
