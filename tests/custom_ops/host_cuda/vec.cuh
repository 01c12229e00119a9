// In place of csrc/include/vec.cuh.
#pragma once

#include <array>
#include <cstring>

namespace lamina {

template <typename T>
constexpr int kVecWidth = 16 / static_cast<int>(sizeof(T));

template <typename T, int kWidth>
struct Vec {
  std::array<T, kWidth> raw;
};

template <int kWidth, typename T>
Vec<T, kWidth> load(const T* from) {
  Vec<T, kWidth> vec;
  std::memcpy(&vec.raw, from, sizeof(vec));
  return vec;
}

template <typename T, int kWidth>
void store(T* to, const Vec<T, kWidth>& vec) {
  std::memcpy(to, &vec.raw, sizeof(vec));
}

template <typename Raw>
void store_raw(void* to, const Raw& raw) {
  std::memcpy(to, &raw, sizeof(raw));
}

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
