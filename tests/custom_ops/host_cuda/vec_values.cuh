// Vectors of csrc/include/vec.cuh, and what is in them.
#pragma once

#include <array>

namespace lamina {

template <typename T>
constexpr int kVecWidth = 16 / static_cast<int>(sizeof(T));

template <typename T, int kWidth>
struct Vec {
  std::array<T, kWidth> raw;
};

template <typename T, int kWidth>
void to_floats(float (&to)[kWidth], const Vec<T, kWidth>& vec) {
  for (int i = 0; i < kWidth; ++i) to[i] = static_cast<float>(vec.raw[i]);
}

template <typename T, int kWidth>
Vec<T, kWidth> from_floats(const float (&from)[kWidth]) {
  Vec<T, kWidth> vec;
  for (int i = 0; i < kWidth; ++i) vec.raw[i] = static_cast<T>(from[i]);
  return vec;
}

}  // namespace lamina
