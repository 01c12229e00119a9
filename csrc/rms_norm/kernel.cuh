// out = x / sqrt(mean(x²) + eps), rounded to x's type, times weight.
#pragma once

#include "row_norm.cuh"

namespace lamina {

inline int rms_norm(const NormArguments& p) { return norm_rows<Weight::kPlain>(p); }

}  // namespace lamina
