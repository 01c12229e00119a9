// total = x + residual, rounded; out = total / sqrt(mean(total²) + eps), rounded, times weight.
#pragma once

#include "row_norm.cuh"

namespace lamina {

template <typename T>
int add_rms_norm(const RowNorm<T>& norm, cudaStream_t stream) {
  return launch_norm<T, true>(norm, stream);
}

}  // namespace lamina
