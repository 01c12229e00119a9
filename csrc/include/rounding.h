// Floats rounded to the type of a tensor, as if a step had stored them there and the next had read them.
#pragma once

#include "vector.h"

namespace lamina {

template <typename T>
inline Vec rounded(Vec x) {
  T narrow[kLanes];
  store(narrow, x);
  return load(narrow);
}

template <>
inline Vec rounded<float>(Vec x) {
  return x;
}

}  // namespace lamina
