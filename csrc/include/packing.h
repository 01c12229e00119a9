// Rows of x, made and packed for a GEMM by the threads that then multiply.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "thread_pool.h"

namespace lamina {

// Rows of x, contiguous. get(token, memory) says where one lies; where they `are_made`, that is in `memory`.
template <typename Get>
struct Rows {
  bool are_made;
  Get get;
};
template <typename Get>
Rows(bool, Get) -> Rows<Get>;

// A part of a job that has to be over before its threads go on.
class Phase {
 public:
  explicit Phase(int64_t count) : count_(count) {}

  // body(chunk) for each that this thread claims, then waits until those of the others are done, or one of them has
  // failed; meanwhile() is called before each chunk and over and over while it waits.
  template <typename Body, typename Meanwhile>
  void run(const Chunks& chunks, const Body& body, const Meanwhile& meanwhile) {
    int64_t num_done = 0;
    while (next_.load(std::memory_order_relaxed) < count_) {
      const int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= count_) break;
      meanwhile();
      body(chunk);
      num_done++;
    }
    if (num_done != 0) num_done_.fetch_add(num_done, std::memory_order_acq_rel);
    for (int64_t turn = 0; num_done_.load(std::memory_order_acquire) < count_ && !chunks.has_failed(); turn++) {
      meanwhile();
      turn < kTurns ? relax() : std::this_thread::yield();  // to one that was stopped in the middle
    }
  }

 private:
  static constexpr int64_t kTurns = 1000;
  const int64_t count_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
};

// Tokens first .. first + count of x: made as rows, where need be, and then packed, each by all threads.
template <typename Kernel, typename Get>
class Packing {
  using T = typename Kernel::Element;
  using Packed = typename Kernel::Packed;

 public:
  Packing(const Kernel& kernel, const Rows<Get>& rows, int64_t first, int64_t count, T* made, Packed* packed)
      : kernel_(kernel),
        rows_(rows),
        first_(first),
        count_(count),
        made_(made),
        packed_(packed),
        rows_at_once_(std::clamp<int64_t>(count / kParts, 1, kMostRows)),
        groups_(divide(count, Kernel::kPackTokens)),
        columns_(columns_at_once(groups_, kernel.depth())),
        pieces_(divide(kernel.depth(), columns_)),
        making_(rows.are_made ? divide(count, rows_at_once_) : 0),
        packing_(groups_ * pieces_) {}

  // By every thread of a job; meanwhile() is called again and again.
  template <typename Meanwhile>
  void run(const Chunks& chunks, const Meanwhile& meanwhile) {
    making_.run(
        chunks, [this](int64_t chunk) { make(chunk * rows_at_once_, std::min(count_, (chunk + 1) * rows_at_once_)); },
        meanwhile);
    packing_.run(chunks, [this](int64_t chunk) { pack(chunk / pieces_, chunk % pieces_ * columns_); }, meanwhile);
  }

 private:
  // As few chunks as give work to the threads of one socket; a thread's share of few tokens is some KB.
  static constexpr int64_t kParts = 16, kMostRows = 16, kLeastSteps = 8;

  static int64_t divide(int64_t count, int64_t size) { return (count + size - 1) / size; }

  static int64_t columns_at_once(int64_t groups, int64_t depth) {
    const int64_t steps = divide(depth, Kernel::kStep);
    return std::max<int64_t>(1, std::min(steps, std::max(kLeastSteps, divide(groups * steps, kParts)))) * Kernel::kStep;
  }

  T* made(int64_t token) const { return made_ + token * kernel_.depth(); }

  void make(int64_t from, int64_t to) const {
    for (int64_t token = from; token < to; token++) rows_.get(first_ + token, made(token));
  }

  void pack(int64_t group, int64_t from) const {
    const T* rows[Kernel::kPackTokens];
    const int64_t token = group * Kernel::kPackTokens;
    const int some = static_cast<int>(std::min<int64_t>(Kernel::kPackTokens, count_ - token));
    for (int t = 0; t < some; t++) rows[t] = rows_.are_made ? made(token + t) : rows_.get(first_ + token + t, nullptr);
    kernel_.pack(rows, token, some, from, std::min(kernel_.depth(), from + columns_), packed_);
  }

  const Kernel& kernel_;
  const Rows<Get>& rows_;
  const int64_t first_, count_;
  T* const made_;
  Packed* const packed_;
  const int64_t rows_at_once_, groups_, columns_, pieces_;
  Phase making_, packing_;
};

}  // namespace lamina
