// In place of csrc/include/vec.cuh.
#pragma once

#include <cstring>

#include "vec_values.cuh"

namespace lamina {

template <int kWidth, typename T>
Vec<T, kWidth> load(const T* from) {
  Vec<T, kWidth> vec;
  std::memcpy(&vec.raw, from, sizeof(vec));
  return vec;
}

template <int kWidth, typename T>
Vec<T, kWidth> load_from_l2(const T* from) {
  return load<kWidth>(from);
}

template <typename T, int kWidth>
void store(T* to, const Vec<T, kWidth>& vec) {
  std::memcpy(to, &vec.raw, sizeof(vec));
}

template <typename Raw>
void store_raw(void* to, const Raw& raw) {
  std::memcpy(to, &raw, sizeof(raw));
}

}  // namespace lamina
