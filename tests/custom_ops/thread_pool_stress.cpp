// What the thread pool promises, tried by many threads at once: every line of output names what was tried.
#include "thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

// Every chunk of a job, once.
void count_chunks(int64_t count, int threads) {
  std::vector<int> times(count);
  lamina::parallel_chunks(count, threads, [&times](int64_t chunk) { times[chunk]++; });
  for (int each : times) require(each == 1, "each chunk is computed once");
}

void try_sizes() {
  for (int64_t count : {0, 1, 2, 3, 7, 64, 1000})
    for (int threads : {-1, 0, 1, 2, 3, 16, 1000}) count_chunks(count, threads);
  std::atomic<int64_t> sum{0};
  lamina::parallel_ranges(1001, 10, 3, [&sum](int64_t begin, int64_t end) {
    require(begin < end && end - begin <= 10, "ranges are no larger than their grain");
    for (int64_t i = begin; i < end; i++) sum += i;
  });
  require(sum == 1000 * 1001 / 2, "ranges cover all");
  std::puts("sizes");
}

void try_callers() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 40; caller++)
    callers.emplace_back([caller] {
      for (int i = 0; i < 40; i++) count_chunks(1 + (caller * 7 + i) % 50, 1 + (caller + i) % 6);
    });
  for (std::thread& caller : callers) caller.join();
  std::puts("callers");
}

void try_nested() {
  std::atomic<int> sum{0};
  lamina::parallel_chunks(20, 4, [&sum](int64_t) {
    const auto self = std::this_thread::get_id();
    lamina::parallel_chunks(5, 4, [&sum, self](int64_t) {
      require(std::this_thread::get_id() == self, "a nested job stays on its thread");
      sum++;
    });
  });
  require(sum == 100, "nested jobs are whole");
  std::puts("nested");
}

void try_exceptions() {
  for (int i = 0; i < 100; i++) {
    std::atomic<int> after{0};
    std::string caught;
    try {
      lamina::parallel_chunks(40, 4, [&](int64_t chunk) {
        if (chunk == i % 40) throw std::runtime_error("chunk " + std::to_string(chunk));
        after++;
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    require(caught == "chunk " + std::to_string(i % 40), "what a body threw is thrown to the caller");
    require(after < 40, "a job that failed is not whole");
    count_chunks(10, 4);
  }
  std::puts("exceptions");
}

// A child has none of its parent's threads, whatever those were doing.
void try_forks() {
  std::atomic<bool> is_over{false};
  std::thread other([&is_over] {
    while (!is_over) count_chunks(30, 3);
  });
  for (int i = 0; i < 20; i++) {
    count_chunks(30, 3);
    const pid_t child = fork();
    if (child == 0) {
      for (int k = 0; k < 50; k++) count_chunks(30, 3);
      _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    require(status == 0, "a child computes with threads of its own");
  }
  is_over = true;
  other.join();
  std::puts("forks");
}

// Threads that have not come are not waited for: a caller does all of a job while they are held elsewhere.
void try_absent_threads() {
  std::atomic<bool> is_held{true};
  std::atomic<int> num_held{0};
  std::thread holder([&] {
    const auto caller = std::this_thread::get_id();
    lamina::parallel_chunks(3, 3, [&](int64_t) {
      if (std::this_thread::get_id() == caller) return;
      num_held++;
      while (is_held) std::this_thread::yield();
    });
  });
  for (int i = 0; i < 50; i++) count_chunks(20, 3);
  is_held = false;
  holder.join();
  std::puts("absent");
}

// Who entered a job, once each, while the chunks take so long that all may come.
std::set<std::thread::id> entered(int64_t count, int threads, std::chrono::milliseconds duration) {
  std::mutex mutex;
  std::set<std::thread::id> found;
  lamina::parallel(count, threads, [&](lamina::Chunks& chunks) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      require(found.insert(std::this_thread::get_id()).second, "nobody comes back to a job");
    }
    for (int64_t chunk; chunks.claim(chunk);) std::this_thread::sleep_for(duration);
  });
  return found;
}

void try_entering() {
  for (int i = 0; i < 20; i++)
    require(entered(2, 4, std::chrono::milliseconds(1)).size() <= 2, "a job has no more threads than chunks");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // all have rested, and sleep
  require(entered(40, 30, std::chrono::milliseconds(100)).size() == 30, "threads are started, or woken by one another");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  require(entered(40, 30, std::chrono::milliseconds(100)).size() == 30, "threads that sleep are woken by one another");
  std::puts("entering");
}

}  // namespace

int main(int argc, char**) {
  try_sizes();
  try_callers();
  try_nested();
  try_exceptions();
  try_absent_threads();
  try_entering();
  if (argc == 1) try_forks();  // ThreadSanitizer knows no threads in a child of many
}
