// out = gelu(gate), rounded, times up.
#pragma once

#include "activations.cuh"

namespace lamina {

inline int gelu_and_mul(const GateArguments& p) { return act_and_mul<Gelu>(p); }

}  // namespace lamina
