// In place of csrc/include/float_ops.cuh.
#pragma once

#include <cmath>

namespace lamina {

constexpr float kLog2E = 1.44269504f;

inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

inline float exp2_fast(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

inline float over_one_and_exp(float x, float power) { return x / (1.0f + std::exp(power)); }

}  // namespace lamina
