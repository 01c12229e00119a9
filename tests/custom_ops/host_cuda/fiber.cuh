// A thread of a GPU as one of many that take turns on a thread of the host.
//
// By jumps: swapcontext asks the system for the signal mask at every turn.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <vector>

namespace host {

class Turns {
 public:
  // function() runs at the first turn, on a stack of its own, and ends by leave().
  void begin(void (*function)()) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_.data(), start_.uc_stack.ss_size = stack_.size();
    makecontext(&start_, function, 0);
    has_begun_ = false;
  }
  // Until it yields or leaves.
  __attribute__((noinline)) void go_on() {
    if (_setjmp(home_) != 0) return;
    if (has_begun_) _longjmp(place_, 1);
    has_begun_ = true;
    setcontext(&start_);
  }
  void yield() {
    if (_setjmp(place_) == 0) leave();
  }
  [[noreturn]] static void leave() { _longjmp(home_, 1); }

 private:
  static inline jmp_buf home_;
  jmp_buf place_;
  ucontext_t start_{};
  std::vector<char> stack_ = std::vector<char>(96 << 10);
  bool has_begun_ = false;
};

}  // namespace host
