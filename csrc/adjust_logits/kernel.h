// Logits with biases, exclusions and penalties applied, by the tokens of prompt and answer so far.
//
// Nothing is sorted and no sum has an order, so a row's numbers are the formula's bit for bit. Multiplications and sums
// are rounded one by one: the file that includes this turns off their contraction.
#pragma once

#include <cstdint>
#include <vector>

#include "vector.h"

namespace lamina {

constexpr int64_t kWordBits = 32;

struct AdjustedRow {
  const int32_t* tokens;  // [length]: of the prompt, num_prompt of them, and of the answer
  int64_t length, num_prompt;
  float repetition, frequency, presence;
  const int32_t* bias_ids;  // [num_biases], -1: none
  const float* biases;
  int64_t num_biases;
  const int32_t* allowed;    // a bit an id, or null: all are
  const int32_t* bad_words;  // [num_bad_words, longest], each at the right, -1 before it
  int64_t num_bad_words, longest;
  const int32_t* banned;  // [num_banned], -1: none
  int64_t num_banned;
  int64_t num_ids;
};

// -inf, but for NaN and infinity: an exclusion is not to hide that a row is broken.
inline Vec excluded(Vec scores) { return scores < kInfinity ? broadcast(-kInfinity) : scores; }

class RowAdjuster {
 public:
  // Writes the scores [num_ids] of a row's logits.
  template <typename T>
  void adjust(const AdjustedRow& row, const T* logits, float* scores) {
    row_ = row, scores_ = scores;
    for (int64_t i = 0; i < row.num_ids; i += kLanes)
      store_some(scores + i, load_some(logits + i, row.num_ids - i), row.num_ids - i);
    add_biases();
    exclude_ids();
    if (row.allowed != nullptr) exclude_what_is_not_allowed();
    if (row.repetition != 1.0f || row.frequency != 0.0f || row.presence != 0.0f) penalize();
  }

 private:
  bool holds(int64_t id) const { return id >= 0 && id < row_.num_ids; }

  void add_biases() const {
    for (int64_t i = 0; i < row_.num_biases; i++)
      if (holds(row_.bias_ids[i])) scores_[row_.bias_ids[i]] += row_.biases[i];
  }

  void exclude(int64_t id) const {
    if (holds(id) && scores_[id] < kInfinity) scores_[id] = -kInfinity;
  }

  void exclude_ids() const {
    for (int64_t i = 0; i < row_.num_banned; i++) exclude(row_.banned[i]);
    for (int64_t i = 0; i < row_.num_bad_words; i++) {
      const int32_t* word = row_.bad_words + i * row_.longest;
      if (holds(word[row_.longest - 1]) && is_met(word)) exclude(word[row_.longest - 1]);
    }
  }

  // Whether all of a word but its last id came last.
  bool is_met(const int32_t* word) const {
    for (int64_t i = 0; i < row_.longest - 1; i++) {
      const int64_t earlier = row_.length - row_.longest + 1 + i;
      if (word[i] >= 0 && (earlier < 0 || row_.tokens[earlier] != word[i])) return false;
    }
    return true;
  }

  void exclude_what_is_not_allowed() const {
    const BitVec lanes = bit_cast<BitVec>(lane_ids());
    for (int64_t i = 0; i < row_.num_ids; i += kLanes) {
      const uint32_t word = static_cast<uint32_t>(row_.allowed[i / kWordBits]) >> i % kWordBits;
      const Vec scores = load_some(scores_ + i, row_.num_ids - i);
      const BitVec is_allowed = (BitVec{} + word) >> lanes & 1;
      store_some(scores_ + i, is_allowed != 0 ? scores : excluded(scores), row_.num_ids - i);
    }
  }

  // Notes of each id whether and how often it was said, which are wiped as they are used.
  void penalize() {
    constexpr uint32_t kWasSaid = 1u << 31;
    if (static_cast<int64_t>(notes_.size()) < row_.num_ids) notes_.resize(row_.num_ids);
    for (int64_t i = 0; i < row_.length; i++)
      if (holds(row_.tokens[i])) {
        uint32_t& note = notes_[row_.tokens[i]];
        note = (note | kWasSaid) + (i >= row_.num_prompt ? 1 : 0);
      }
    for (int64_t i = 0; i < row_.length; i++) {
      if (!holds(row_.tokens[i])) continue;
      uint32_t& note = notes_[row_.tokens[i]];
      if (note != 0) scores_[row_.tokens[i]] = penalized(scores_[row_.tokens[i]], note & ~kWasSaid);
      note = 0;
    }
  }

  float penalized(float score, uint32_t times) const {
    score = score > 0.0f ? score / row_.repetition : score * row_.repetition;
    return times == 0 ? score : score - row_.frequency * static_cast<float>(times) - row_.presence;
  }

  AdjustedRow row_ = {};
  float* scores_ = nullptr;
  std::vector<uint32_t> notes_;  // zeros between rows
};

}  // namespace lamina
