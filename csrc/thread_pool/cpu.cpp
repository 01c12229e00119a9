// The threads that all kernels of a process share.
//
// A thread joins a job while that is open; its caller takes chunks itself until none is left, closes the job and waits
// for those that have joined, never for one that has not come. Idle threads spin, since the next kernel of a step
// begins within microseconds, and then sleep. A thread that the system wakes on its caller's own CPU, as it likes to
// where another process has the rest, would only take turns with it, and moves away; one that is stopped in the middle
// of jobs rests.
//
// Many threads that change one word take turns, each for as long as a message between cores takes. So a thread that
// comes and goes writes to a cache line of its own; the one line that all of them look at changes with a job alone.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "packed_calls.h"
#include "rest.h"
#include "thread_pool.h"

namespace lamina {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNumSlots = 16;  // callers at once; more compute alone
constexpr int kWokenByOne = 4;
constexpr auto kSpin = std::chrono::microseconds(50);

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

// The state of a slot in a word: whether its job may be joined, by threads up to which number, and how many jobs the
// slot has had, so that no two of them have the same state.
constexpr uint32_t kOpen = 1;
constexpr int kLastShift = 1, kCountShift = 9;
static_assert(kMaxThreads <= 1 << (kCountShift - kLastShift), "what a state has room for");

inline int last_of(uint32_t state) { return static_cast<int>(state >> kLastShift) & (kMaxThreads - 1); }
inline uint32_t closed(uint32_t state) { return state >> kCountShift << kCountShift; }

// The states of all slots, in one cache line; and what a thread has seen of them, who does nothing twice.
struct alignas(64) Board {
  std::atomic<uint32_t> states[kNumSlots] = {};

  bool shows_new(const uint32_t* seen) const {
    for (int slot = 0; slot < kNumSlots; slot++) {
      const uint32_t state = states[slot].load();
      if ((state & kOpen) != 0 && state != seen[slot]) return true;
    }
    return false;
  }

  // The last of the threads that may join a job.
  int last() const {
    int found = 0;
    for (const std::atomic<uint32_t>& each : states)
      if (const uint32_t state = each.load(); (state & kOpen) != 0) found = std::max(found, last_of(state));
    return found;
  }
};
static_assert(sizeof(Board) == 64, "one cache line");

// Who calls a job, written by callers alone.
struct alignas(64) Slot {
  std::atomic<bool> is_taken{false};
  std::atomic<int> cpu{-1};
  ParallelJob* job = nullptr;
};

// Where a thread of the pool is, written by that alone: in the job of a slot, or asleep. The job is there at least
// until a thread has left whose seat had the slot before it saw the state open.
struct alignas(64) Seat {
  static constexpr int kNone = -1;
  std::atomic<int> slot{kNone};
  std::atomic<bool> is_asleep{false};
  std::mutex mutex;
  std::condition_variable called;
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
    const int slot = take();
    if (slot < 0) return false;
    const int last = job.num_parts - 1;
    open(slot, job, last);
    if (num_threads_.load(std::memory_order_relaxed) < last) start(last);
    if (num_sleeping_.load() != 0) wake_behind(0, last);
    run_part(job, 0);
    close(slot, last);
    return true;
  }

 private:
  int take() {
    for (int slot = 0; slot < kNumSlots; slot++)
      if (!slots_[slot].is_taken.load(std::memory_order_relaxed) &&
          !slots_[slot].is_taken.exchange(true, std::memory_order_acquire))
        return slot;
    return -1;
  }

  void open(int slot, ParallelJob& job, int last) {
    slots_[slot].job = &job;
    slots_[slot].cpu.store(Cpus::current(), std::memory_order_relaxed);
    std::atomic<uint32_t>& state = board_.states[slot];
    const uint32_t before = closed(state.load(std::memory_order_relaxed));
    state.store(before + (1u << kCountShift) + (static_cast<uint32_t>(last) << kLastShift) + kOpen);
  }

  // Returns when nobody is in the job any more.
  void close(int slot, int last) {
    std::atomic<uint32_t>& state = board_.states[slot];
    state.store(closed(state.load(std::memory_order_relaxed)));
    int number = 1;
    const auto is_left = [&] {
      while (number <= last && seats_[number].slot.load() != slot) number++;
      return number > last;
    };
    if (!is_left() && !spin(is_left)) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_waiting_.fetch_add(1);
      left_.wait(lock, is_left);
      num_waiting_.fetch_sub(1);
    }
    slots_[slot].is_taken.store(false, std::memory_order_release);
  }

  // Wakes threads behind a caller, or behind a thread that was woken: a few, who wake others, since to wake one takes
  // microseconds. Who is awake, or rests, wakes nobody, and has those behind it woken here.
  void wake_behind(int number, int last) {
    const int first = number * kWokenByOne + 1;
    for (int next = first; next <= std::min(last, first + kWokenByOne - 1); next++) {
      Seat& seat = seats_[next];
      if (seat.is_asleep.load()) {
        std::unique_lock<std::mutex>(seat.mutex).unlock();  // it waits by now, or will look once more
        seat.called.notify_one();
      } else {
        wake_behind(next, last);
      }
    }
  }

  void start(int last) {
    std::lock_guard<std::mutex> lock(mutex_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    try {
      for (int number = num_threads_ + 1; number <= last; number++, num_threads_++)
        std::thread([this, number] { serve(number); }).detach();
    } catch (const std::system_error&) {  // as many as the system gives
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(int number) {
    Seat& seat = seats_[number];
    uint32_t seen[kNumSlots] = {};
    Rest<ThreadTime> rest;
    const auto is_called = [this, &seen] { return board_.shows_new(seen); };
    for (;;) {
      if (help(number, seat, seen)) {
        rest.after_job();
        continue;
      }
      if (spin(is_called)) continue;
      sleep(seat, is_called);
      if (num_sleeping_.load() != 0) wake_behind(number, board_.last());
      rest.begin();
    }
  }

  template <typename Condition>
  void sleep(Seat& seat, const Condition& is_called) {
    std::unique_lock<std::mutex> lock(seat.mutex);
    num_sleeping_.fetch_add(1);
    seat.is_asleep.store(true);
    seat.called.wait(lock, is_called);
    seat.is_asleep.store(false);
    num_sleeping_.fetch_sub(1);
  }

  // Whether there was a job to join.
  bool help(int number, Seat& seat, uint32_t* seen) {
    bool has_helped = false;
    for (int slot = 0; slot < kNumSlots; slot++) {
      if (wanted(number, slot, seen) == 0) continue;
      const int cpu = Cpus::current();
      if (cpu >= 0 && cpu == slots_[slot].cpu.load(std::memory_order_relaxed)) cpus_.leave(cpu);
      seat.slot.store(slot);
      if (const uint32_t state = wanted(number, slot, seen); state != 0) {
        seen[slot] = state;
        run_part(*slots_[slot].job, number);
        has_helped = true;
      }
      seat.slot.store(Seat::kNone);
      if (num_waiting_.load() == 0) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      left_.notify_all();
    }
    return has_helped;
  }

  // The state of a job that this thread may join and has not seen, or 0.
  uint32_t wanted(int number, int slot, uint32_t* seen) const {
    const uint32_t state = board_.states[slot].load();
    if ((state & kOpen) == 0 || state == seen[slot]) return 0;
    if (number <= last_of(state)) return state;
    seen[slot] = state;
    return 0;
  }

  const Cpus cpus_;
  Board board_;
  Slot slots_[kNumSlots];
  Seat seats_[kMaxThreads];  // by their numbers; callers are 0
  alignas(64) std::atomic<int> num_threads_{0};
  std::atomic<int> num_sleeping_{0}, num_waiting_{0};
  std::mutex mutex_;
  std::condition_variable left_;
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
