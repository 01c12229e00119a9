// Counter-based noise of a draw, by (seed, position, counter): integers up to one logarithm, the same on every device.
#pragma once

#include <cmath>
#include <cstdint>

namespace lamina {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

inline uint64_t mix(uint64_t words) {
  words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9;
  words = (words ^ (words >> 27)) * 0x94D049BB133111EB;
  return words ^ (words >> 31);
}

// A bijection of words that lets high bits reach low ones, then low bits high ones.
inline uint32_t stir(uint32_t bits, int shift, uint32_t factor) { return (bits ^ (bits >> shift)) * factor; }

class Noise {
 public:
  Noise(int64_t seed, int64_t position)
      : key_(mix(mix(static_cast<uint64_t>(seed) + kGolden) + static_cast<uint64_t>(position) * kGolden)) {}

  // Exp(1), the same for the same counter.
  float operator()(int64_t counter) const {
    uint32_t bits = (static_cast<uint32_t>(counter) * 0x9E3779B9u) ^ static_cast<uint32_t>(key_);
    bits = stir(bits, 16, 0x85EBCA6B) + static_cast<uint32_t>(key_ >> 32);
    bits = stir(stir(bits, 13, 0xC2B2AE35), 16, 0x7FEB352D);
    bits = (bits ^ static_cast<uint32_t>(static_cast<int32_t>(bits) >> 15)) & 0x7FFFFFFF;
    return static_cast<float>(-std::log((bits + 0.5) * 0x1p-31));
  }

 private:
  uint64_t key_;
};

}  // namespace lamina
