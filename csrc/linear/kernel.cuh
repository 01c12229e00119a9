// out = x * weightᵀ + bias
#pragma once

#include "resident_launch.cuh"

namespace lamina {

template <typename T>
int linear(const Linear<T>& p, const void* weight, const void* x, int64_t x_stride, const Cut& cut,
           cudaStream_t stream) {
  if (cut.clusters > 0) return resident_linear<T, false>(p, weight, x, x_stride, cut, stream);
  return with_cut<false, 8, 16, 32, 64, 128, 256>(cut, [&](auto groups, auto tokens) {
    return launch_linear<T, groups.value, tokens.value, false>(p, weight, x, x_stride, stream);
  });
}

}  // namespace lamina
