// The threads that all kernels of a process share.
//
// A thread joins a job while that is open; its caller takes chunks itself until none is left, closes the job and waits
// for those that have joined, never for one that has not come. Idle threads spin, since the next kernel of a step
// begins within microseconds, and then sleep. A thread that the system wakes on its caller's own CPU, as it likes to
// where another process has the rest, would only take turns with it, and moves away; one that is stopped in the middle
// of jobs rests.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "rest.h"
#include "thread_pool.h"

namespace lamina {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNumSlots = 16;  // callers at once; more compute alone
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr uint32_t kOpen = 1u << 31, kTaken = 1u << 30, kJoined = (1u << 12) - 1;
constexpr int kWantedShift = 12;
static_assert(kMaxThreads <= kJoined, "what a state has room for");

#if defined(__linux__)
// The CPUs that the process may use, as they were when its pool was made.
class Cpus {
 public:
  Cpus() {
    if (sched_getaffinity(0, sizeof(all_), &all_) != 0) CPU_ZERO(&all_);
  }
  static int current() { return sched_getcpu(); }

  // Keeps this thread off a CPU, where there is another.
  void leave(int cpu) const {
    cpu_set_t others = all_;
    if (cpu < 0 || cpu >= CPU_SETSIZE || CPU_COUNT(&all_) < 2) return;
    CPU_CLR(cpu, &others);
    sched_setaffinity(0, sizeof(others), &others);
  }

 private:
  cpu_set_t all_;
};
#else
class Cpus {
 public:
  static int current() { return -1; }
  void leave(int) const {}
};
#endif

// This thread's time, for Rest.
struct ThreadTime {
  static std::chrono::nanoseconds now() { return Clock::now().time_since_epoch(); }
  static std::chrono::nanoseconds used() {
    timespec found;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &found);
    return std::chrono::seconds(found.tv_sec) + std::chrono::nanoseconds(found.tv_nsec);
  }
  static void sleep(std::chrono::nanoseconds duration) { std::this_thread::sleep_for(duration); }
};

// Whether a condition came true while this thread spun for it.
template <typename Condition>
bool spin(const Condition& is_met) {
  for (const auto end = Clock::now() + kSpin; Clock::now() < end;)
    for (int i = 0; i < 16; i++, relax())
      if (is_met()) return true;
  return false;
}

// A job that is being run. `state`: kTaken by a caller, kOpen to threads, how many of them it wants, how many are in
// it.
struct alignas(64) Slot {
  std::atomic<uint32_t> state{0};
  std::atomic<int> cpu{-1};  // of the caller
  ParallelJob* job = nullptr;

  bool open(ParallelJob* of) {
    uint32_t free = 0;
    if (!state.compare_exchange_strong(free, kTaken, std::memory_order_acquire)) return false;
    job = of;
    cpu.store(Cpus::current(), std::memory_order_relaxed);
    state.store(kTaken | kOpen | static_cast<uint32_t>(of->num_parts - 1) << kWantedShift, std::memory_order_release);
    return true;
  }

  bool is_open() const { return (state.load(std::memory_order_acquire) & kOpen) != 0; }

  bool join() {
    uint32_t now = state.load(std::memory_order_relaxed);
    while ((now & kOpen) != 0 && (now & kJoined) < (now >> kWantedShift & kJoined))
      if (state.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
    return false;
  }

  bool is_left() const { return (state.load() & kJoined) == 0; }
};

thread_local bool is_inside = false;  // a body

void run_part(ParallelJob& job, int part) {
  is_inside = true;
  try {
    job.run(job, part);
  } catch (...) {
    if (!job.has_failed.exchange(true)) job.error = std::current_exception();
  }
  is_inside = false;
}

class Pool {
 public:
  // Whether a slot was free.
  bool run(ParallelJob& job) {
    Slot* slot = open(job);
    if (slot == nullptr) return false;
    call(job.num_parts - 1);
    run_part(job, 0);
    slot->state.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto is_left = [slot] { return slot->is_left(); };
    if (!is_left() && !spin(is_left)) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_waiting_.fetch_add(1);
      left_.wait(lock, is_left);
      num_waiting_.fetch_sub(1);
    }
    slot->state.store(0, std::memory_order_release);
    return true;
  }

 private:
  Slot* open(ParallelJob& job) {
    for (Slot& slot : slots_)
      if (slot.open(&job)) return &slot;
    return nullptr;
  }

  // Tells the threads that there is a job, and starts those that there have never been.
  void call(int wanted) {
    num_opened_.fetch_add(1);
    if (num_threads_.load(std::memory_order_relaxed) < wanted) start(wanted);
    if (num_sleeping_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (int i = std::min(wanted, num_sleeping_.load()); i > 0; i--) opened_.notify_one();
  }

  void start(int wanted) {
    std::lock_guard<std::mutex> lock(mutex_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    try {
      for (int number = num_threads_; number < wanted; number++, num_threads_++)
        std::thread([this, number] { serve(number + 1); }).detach();
    } catch (const std::system_error&) {  // as many as the system gives
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(int number) {
    Rest<ThreadTime> rest;
    for (;;) {
      const uint32_t seen = num_opened_.load();
      if (help(number)) {
        rest.after_job();
        continue;
      }
      const auto is_called = [this, seen] { return num_opened_.load() != seen; };
      if (spin(is_called)) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleeping_.fetch_add(1);
      opened_.wait(lock, is_called);
      num_sleeping_.fetch_sub(1);
      lock.unlock();
      rest.begin();
    }
  }

  // Whether there was a job to join.
  bool help(int number) {
    bool has_helped = false;
    for (Slot& slot : slots_) {
      if (!slot.is_open()) continue;
      const int cpu = Cpus::current();
      if (cpu >= 0 && cpu == slot.cpu.load(std::memory_order_relaxed)) cpus_.leave(cpu);
      if (!slot.join()) continue;
      run_part(*slot.job, number % slot.job->num_parts);
      has_helped = true;
      slot.state.fetch_sub(1);
      if (num_waiting_.load() == 0) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      left_.notify_all();
    }
    return has_helped;
  }

  const Cpus cpus_;
  Slot slots_[kNumSlots];
  alignas(64) std::atomic<uint32_t> num_opened_{0};
  std::atomic<int> num_threads_{0}, num_sleeping_{0}, num_waiting_{0};
  std::mutex mutex_;
  std::condition_variable opened_, left_;
};

std::atomic<Pool*> pool{nullptr};  // never deleted: its threads live as long as the process

Pool* make_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    if (pool.load() != nullptr) pool.store(new Pool());  // threads do not come along to a child, locks as they were
    is_inside = false;
  });
  static_cast<void>(registered);
  Pool *made = new Pool(), *before = nullptr;
  if (pool.compare_exchange_strong(before, made)) return made;
  delete made;
  return before;
}

}  // namespace

extern "C" void lamina_run_job(ParallelJob* job) {
  Pool* threads = pool.load(std::memory_order_acquire);
  if (threads == nullptr) threads = make_pool();
  if (is_inside) return job->run(*job, 0);
  if (!threads->run(*job)) run_part(*job, 0);
  if (job->error) std::rethrow_exception(job->error);
}

}  // namespace lamina
