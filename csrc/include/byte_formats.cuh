// Formats of operands in one byte, and the largest number that each has.
#pragma once

#include <cstdint>

#include "fp8.cuh"

namespace lamina {

// Whole numbers.
struct Int8 {
  int8_t value;
};

template <typename Format>
constexpr float kLargest = kLargestFp8;
template <>
constexpr float kLargest<Int8> = 127.0f;

}  // namespace lamina
