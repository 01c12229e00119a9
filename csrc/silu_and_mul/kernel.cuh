// out = silu(gate), rounded, times up.
#pragma once

#include "activations.cuh"

namespace lamina {

inline int silu_and_mul(const GateArguments& p) { return act_and_mul<Silu>(p); }

}  // namespace lamina
