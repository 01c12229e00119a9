// Values as they are after a step that writes them in the type of the tensors.
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
