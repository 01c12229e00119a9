// bfloat16 on a host.
#pragma once

#include <cstdint>
#include <cstring>

// bfloat16: the upper half of a float, rounded to even.
struct Bf16 {
  uint16_t bits = 0;
  Bf16() = default;
  explicit Bf16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};
