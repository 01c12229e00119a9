// In place of csrc/include/float_ops.cuh.
#pragma once

#include <cmath>

namespace lamina {

inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

inline float fast_exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

}  // namespace lamina
