// out = x / sqrt(mean(x²) + eps) * (1 + weight), rounded once to x's type.
#pragma once

#include "row_norm.cuh"

namespace lamina {

inline int zero_centred_rms_norm(const NormArguments& p) { return norm_rows<Weight::kZeroCentred>(p); }

}  // namespace lamina
