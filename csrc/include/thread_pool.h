// Work of a kernel, spread over the threads of the one pool that a process has (csrc/thread_pool).
//
// It is cut into chunks by its shape, never by the number of threads, so that bits do not depend on who computes them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace lamina {

constexpr int kMaxThreads = 256;

// What a thread does that waits for another one without leaving its CPU.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A part of the chunks; whoever adds one to `next` has claimed the chunk that it stood at.
struct alignas(64) ChunkRange {
  std::atomic<int64_t> next;
  int64_t end;
};

// A call of parallel(), on the stack of its caller: a part of the chunks for each thread that may come.
struct ParallelJob {
  void (*run)(ParallelJob& job, int part);
  const void* body;
  int num_parts;
  std::atomic<bool> has_failed{false};
  std::exception_ptr error;  // of the first body that threw
  ChunkRange ranges[kMaxThreads];

  ParallelJob(int64_t count, int threads)
      : num_parts(static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(count, threads), 1, kMaxThreads))) {
    for (int64_t part = 0; part < num_parts; part++) {
      ranges[part].next.store(count * part / num_parts, std::memory_order_relaxed);
      ranges[part].end = count * (part + 1) / num_parts;
    }
  }
};

// The chunks that a thread takes: those of its own part, neighbours in memory, then what others have left of theirs.
class Chunks {
 public:
  Chunks(ParallelJob& job, int part) : job_(job), part_(part), num_left_(job.num_parts) {}

  // Whether another chunk was there to claim, and which.
  bool claim(int64_t& chunk) {
    for (; num_left_ > 0 && !has_failed(); num_left_--) {
      ChunkRange& range = job_.ranges[part_];
      if (range.next.load(std::memory_order_relaxed) < range.end) {
        chunk = range.next.fetch_add(1, std::memory_order_relaxed);
        if (chunk < range.end) return true;
      }
      part_ = part_ + 1 == job_.num_parts ? 0 : part_ + 1;
    }
    return false;
  }

  // Whether a body threw; then no chunk is left to claim.
  bool has_failed() const { return job_.has_failed.load(std::memory_order_relaxed); }

  // The chunk that claim will probably give, or -1.
  int64_t next() const {
    const int64_t next = job_.ranges[part_].next.load(std::memory_order_relaxed);
    return num_left_ > 0 && next < job_.ranges[part_].end ? next : -1;
  }

 private:
  ParallelJob& job_;
  int part_, num_left_;
};

// Runs a job whose `run` and `body` are set, by the calling thread and by those of the pool that come in time.
extern "C" void lamina_run_job(ParallelJob* job);

// body(chunks) on up to `threads` threads at once, each with the chunks of [0, count) that it claims. Returns when all
// are done; throws what a body threw. A call from inside a body runs on its thread alone.
template <typename Body>
void parallel(int64_t count, int threads, const Body& body) {
  if (count <= 0) return;
  ParallelJob job(count, threads);
  if (job.num_parts == 1) {
    Chunks all(job, 0);
    return body(all);
  }
  job.body = &body;
  job.run = [](ParallelJob& self, int part) {
    Chunks chunks(self, part);
    (*static_cast<const Body*>(self.body))(chunks);
  };
  lamina_run_job(&job);
}

// body(chunk) once for every chunk of [0, count).
template <typename Body>
void parallel_chunks(int64_t count, int threads, const Body& body) {
  parallel(count, threads, [&body](Chunks& chunks) {
    for (int64_t chunk; chunks.claim(chunk);) body(chunk);
  });
}

// body(begin, end) of neighbours among [0, count), at most `grain` at a time.
template <typename Body>
void parallel_ranges(int64_t count, int64_t grain, int threads, const Body& body) {
  parallel_chunks((count + grain - 1) / grain, threads,
                  [&body, count, grain](int64_t chunk) { body(chunk * grain, std::min(count, (chunk + 1) * grain)); });
}

}  // namespace lamina
