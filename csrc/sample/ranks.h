// Where top-k and top-p end in a row of gaps, found by counting instead of sorting the row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "vector.h"

namespace lamina {

// The last of the kept tokens: its gap, and how many with exactly this gap are kept.
struct Last {
  float gap;
  int64_t equals;
};

// Gaps are not negative, so they sort like their bits: the upper bits are a bin, and only one bin is ever sorted.
class Ranks {
 public:
  void count(const float* gaps, const float* odds, int64_t size) {
    gaps_ = gaps, odds_ = odds, size_ = size;
    std::fill(counts_.begin(), counts_.end(), 0);
    std::fill(masses_.begin(), masses_.end(), 0.0);
    for (int64_t i = 0; i < size; i++) {
      const size_t bin = bin_of(gaps[i]);
      counts_[bin]++;
      masses_[bin] += odds[i];
    }
  }

  // Of the first `most` tokens the fewest that hold `share` of their mass; a share of 1 or more is all of them.
  Last find(int64_t most, double share) {
    if (most == size_ && share < 1) return find_mass(share * std::accumulate(masses_.begin(), masses_.end(), 0.0));
    int64_t before = 0;
    double mass = 0;
    size_t bin = 0;
    for (; before + counts_[bin] < most; bin++) before += counts_[bin], mass += masses_[bin];
    sort(bin);
    if (share >= 1) return last_of(most - before);
    for (int64_t i = 0; i < most - before; i++) mass += sorted_[i].second;
    return find_mass(share * mass);
  }

 private:
  static constexpr int kShift = 18;
  static constexpr size_t kBins = (0x7f800000u >> kShift) + 1;  // infinity is in the last

  static size_t bin_of(float gap) { return bit_cast<uint32_t>(gap) >> kShift; }

  // The fewest of all tokens that hold a mass, which is less than that of those among which they are looked for.
  Last find_mass(double goal) {
    double mass = 0;
    size_t bin = 0;
    for (; mass + masses_[bin] < goal; bin++) mass += masses_[bin];
    sort(bin);
    const auto reaches = [&](const std::pair<float, float>& token) { return (mass += token.second) >= goal; };
    // The last of the bin at the latest: a sum in another order may be rounded to below the goal.
    return last_of(std::find_if(sorted_.begin(), std::prev(sorted_.end()), reaches) - sorted_.begin() + 1);
  }

  void sort(size_t bin) {
    sorted_.clear();
    for (int64_t i = 0; i < size_; i++)
      if (bin_of(gaps_[i]) == bin) sorted_.push_back({gaps_[i], odds_[i]});
    std::sort(sorted_.begin(), sorted_.end());
  }

  Last last_of(int64_t kept) const {
    const float gap = sorted_[kept - 1].first;
    const auto first = std::lower_bound(sorted_.begin(), sorted_.end(), std::pair<float, float>{gap, 0.0f});
    return {gap, kept - (first - sorted_.begin())};
  }

  const float *gaps_ = nullptr, *odds_ = nullptr;
  int64_t size_ = 0;
  std::vector<int64_t> counts_ = std::vector<int64_t>(kBins);
  std::vector<double> masses_ = std::vector<double>(kBins);
  std::vector<std::pair<float, float>> sorted_;
};

}  // namespace lamina
