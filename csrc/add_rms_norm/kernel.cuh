// total = x + residual, rounded; out = s / sqrt(mean(s²) + eps), rounded, times weight, where s is total, or the sum
// before it was rounded.
#pragma once

#include "row_norm.cuh"

namespace lamina {

inline int add_rms_norm(const SumAndNormArguments& p) { return add_and_norm_rows<Weight::kPlain>(p); }

}  // namespace lamina
