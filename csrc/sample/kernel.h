// The token of a row of logits: the largest, or a draw from what the filters keep.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "buffer.h"
#include "noise.h"
#include "ranks.h"
#include "vector.h"

namespace lamina {

constexpr int64_t kChunk = 256;  // tokens that take part in the first race together
constexpr float kLargest = std::numeric_limits<float>::max();

struct RowSettings {
  float temperature, top_p, min_p;
  int64_t top_k, seed, position;
  const int32_t* banned;
  int64_t num_banned;
};

constexpr int64_t kBroken = -1;         // in place of a token where logits are not finite; the formula has the same
constexpr double kReach = 1 - 0x1p-20;  // likewise

// The first of the largest scores seen; NaN is largest.
class Winner {
 public:
  void see(float score, int64_t index) {
    if (index_ < 0 || score > score_ || (score != score && score_ == score_)) score_ = score, index_ = index;
  }
  float score() const { return score_; }
  int64_t index() const { return index_; }

 private:
  float score_ = 0;
  int64_t index_ = -1;
};

// What one thread needs to sample rows, kept from row to row.
class RowSampler {
 public:
  template <typename T>
  int64_t sample(const T* logits, int64_t num_ids, const RowSettings& row) {
    num_ids_ = num_ids;
    num_chunks_ = (num_ids + kChunk - 1) / kChunk;
    if (row.temperature <= 0 && row.num_banned == 0) return sound(find_largest(logits));
    values_ = values_buffer_.reserve(num_chunks_ * kChunk + 1);
    for (int64_t i = 0; i < num_ids; i += kLanes) store(values_ + i, load_some(logits + i, num_ids - i));
    std::fill(values_ + num_ids, values_ + num_chunks_ * kChunk, -kInfinity);
    for (int64_t i = 0; i < row.num_banned; i++)  // what is no id bans the place behind them
      ban(values_[std::min<int64_t>(static_cast<uint32_t>(row.banned[i]), num_ids)]);
    const Largest largest = find_largest(static_cast<const float*>(values_));
    const int64_t id = sound(largest);
    return row.temperature <= 0 || id == kBroken ? id : draw(largest.logit, row);
  }

 private:
  struct Largest {
    float logit;
    int64_t id;  // the lowest that has it
  };

  // NaN and infinity stay: a ban is not to hide that a row is broken.
  static void ban(float& logit) {
    if (logit < kInfinity) logit = -kInfinity;
  }

  static int64_t sound(const Largest& largest) { return std::isfinite(largest.logit) ? largest.id : kBroken; }

  // Chunk by chunk: only in the one that has it an id is looked for.
  template <typename T>
  Largest find_largest(const T* logits) const {
    Winner chunk;
    for (int64_t first = 0; first < num_ids_; first += kChunk) {
      Vec most = broadcast(-kInfinity), broken = {};
      for (int64_t i = first; i < std::min(first + kChunk, num_ids_); i += kLanes) {
        Vec x = num_ids_ - i >= kLanes ? load(logits + i) : load_few(logits + i, num_ids_ - i);
        most = max(x, most);
        broken = x == x ? broken : x;
      }
      const float worst = reduce(broken, [](Vec a, Vec b) { return a + b; });
      chunk.see(worst != worst ? worst : reduce(most, [](Vec a, Vec b) { return max(a, b); }), first);
    }
    Winner token;
    for (int64_t i = chunk.index(); i < std::min(chunk.index() + kChunk, num_ids_); i++)
      token.see(load_some(logits + i, 1)[0], i);
    return {token.score(), token.index()};
  }

  template <typename T>
  static Vec load_few(const T* logits, int64_t count) {
    Vec x = load_some(logits, count);
    return lane_ids() < static_cast<int32_t>(count) ? x : broadcast(-kInfinity);
  }

  int64_t draw(float largest, const RowSettings& row) {
    const int64_t size = num_chunks_ * kChunk;
    odds_ = odds_buffer_.reserve(size);
    largest += 0.0f;  // not -0, so that no gap is: bins go by bits
    measure(largest, std::min(1.0f / row.temperature, kLargest));
    const bool has_top_k = row.top_k > 0 && row.top_k < size, has_top_p = row.top_p < 1;
    if (has_top_k || has_top_p || row.min_p > 0) {
      Last last{kInfinity, size};
      if (has_top_k || has_top_p) {
        ranks_.count(values_, odds_, size);
        last = ranks_.find(has_top_k ? row.top_k : size, has_top_p ? row.top_p * kReach : 1);
      }
      const float limit = std::max(0.0f, static_cast<float>(-std::log(row.min_p * kReach)));
      keep(limit < last.gap ? Last{limit, size} : last);
    }
    return race(Noise(row.seed, row.position));
  }

  // Logits to gaps, (largest - logit) / temperature, and odds, exp(-gap).
  void measure(float largest, float sharpness) {
    for (int64_t i = 0; i < num_chunks_ * kChunk; i += kLanes) {
      Vec gap = (largest - load(values_ + i)) * sharpness;
      store(values_ + i, gap);
      store(odds_ + i, exp(-gap));
    }
  }

  void keep(const Last& last) {
    const int64_t size = num_chunks_ * kChunk;
    for (int64_t i = 0; i < size; i += kLanes) store(odds_ + i, load(values_ + i) > last.gap ? Vec{} : load(odds_ + i));
    int64_t equals = last.equals;
    for (int64_t i = 0; i < size && last.equals < size; i++)
      if (values_[i] == last.gap && --equals < 0) odds_[i] = 0;
  }

  // The largest has odds of 1, whatever is kept: some chunk has mass, and in it some token odds.
  int64_t race(const Noise& noise) const {
    Winner chunk, token;
    for (int64_t c = 0; c < num_chunks_; c++) {
      Vec mass = {};
      for (int64_t i = 0; i < kChunk; i += kLanes) mass += load(odds_ + c * kChunk + i);
      const float sum = reduce(mass, [](Vec a, Vec b) { return a + b; });
      if (sum != 0) chunk.see(sum / noise(-1 - c), c);
    }
    for (int64_t i = chunk.index() * kChunk; i < (chunk.index() + 1) * kChunk; i++)
      if (odds_[i] != 0) token.see(odds_[i] / noise(i), i);
    return token.index();
  }

  int64_t num_ids_ = 0, num_chunks_ = 0;
  float *values_ = nullptr, *odds_ = nullptr;
  Buffer values_buffer_, odds_buffer_;
  Ranks ranks_;
};

}  // namespace lamina
