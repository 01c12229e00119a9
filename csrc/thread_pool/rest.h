// When a thread of the pool leaves its CPU to others, because its callers are quicker without it.
#pragma once

#include <algorithm>
#include <chrono>

namespace lamina {

// Where another process wants this thread's CPU, the system stops it in the middle of jobs, for milliseconds, and its
// caller waits for it; and with one thread more than there are CPUs the caller itself is stopped, too. So a thread that
// was stopped sleeps for a while, and longer each time that it is stopped again soon after. Whoever stops it rarely
// costs it little: OpenMP's threads of this process turn for 8.5 ms behind work of torch's own, as behind a prompt.
// What it has learnt of a busy process is forgotten where nobody stops it for long, since that is gone by then.
//
// Time has now(), of a clock, and used(), what the thread has computed, both as durations; and sleep(duration).
template <typename Time>
class Rest {
  using Duration = std::chrono::nanoseconds;

 public:
  static constexpr Duration kTurn = std::chrono::microseconds(700);  // shorter stops are the system's own
  static constexpr Duration kShortest = std::chrono::milliseconds(5), kLongest = std::chrono::milliseconds(160);
  static constexpr Duration kSoon = std::chrono::milliseconds(100), kLong = std::chrono::seconds(1);  // after a rest

  explicit Rest(Time time = Time()) : time_(time) { begin(); }

  // To be called after each job: sleeps where the thread was stopped since begin().
  void after_job() {
    const Duration now = time_.now();
    if (now - now_ <= kTurn) return;  // to ask for what was computed takes as long as a small job
    const Duration used = time_.used();
    const bool was_stopped = (now - now_) - (used - used_) > kTurn;
    now_ = now, used_ = used;
    if (!was_stopped) return;
    length_ = next_length(now - rested_);
    time_.sleep(length_);
    begin();
    rested_ = now_;
  }

  // To be called after the thread has slept for want of jobs.
  void begin() { now_ = time_.now(), used_ = time_.used(); }

 private:
  Duration next_length(Duration since_rest) const {
    if (since_rest > kLong) return kShortest;
    return since_rest > kSoon ? std::max(length_ / 2, kShortest) : std::min(length_ * 2, kLongest);
  }

  Time time_;
  Duration now_{}, used_{}, length_ = kShortest, rested_ = -2 * kLong;
};

}  // namespace lamina
