// Fixed splits: how partial results of a row are merged, to the same bits wherever that happens.
#pragma once

#include "float_ops.cuh"

namespace lamina {

// What is multiplied by what where two partial results of a row become one, by their maxima in base 2. Results that saw
// no key (-INFINITY) leave no trace.
struct MergeWeights {
  float max, keep, weight;
  bool takes_all, takes_none;

  __device__ __forceinline__ MergeWeights(float kept, float added) {
    max = fmaxf(kept, added);
    takes_none = added == -INFINITY, takes_all = kept == -INFINITY && !takes_none;
    const float base = max == -INFINITY ? 0.0f : max;
    keep = exp2_fast(__fsub_rn(kept, base)), weight = exp2_fast(__fsub_rn(added, base));
  }

  // In an order and with roundings of its own, whatever the compiler makes of the code around it.
  __device__ __forceinline__ float merged(float kept, float added) const {
    const float both = __fmaf_rn(kept, keep, __fmul_rn(added, weight));
    return takes_none ? kept : takes_all ? added : both;
  }
};

}  // namespace lamina
