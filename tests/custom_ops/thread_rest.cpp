// When a thread of the pool rests, by a clock that the test moves: every line of output names what was tried.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "rest.h"

using namespace std::chrono_literals;
using Nanoseconds = std::chrono::nanoseconds;

namespace {

struct World {
  Nanoseconds now{}, used{};
  std::vector<Nanoseconds> rests;
} world;

struct Time {
  static Nanoseconds now() { return world.now; }
  static Nanoseconds used() { return world.used; }
  static void sleep(Nanoseconds duration) { world.now += duration, world.rests.push_back(duration); }
};

void require(bool holds, const char* what) {
  std::puts(what);
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

// Jobs of 100 us, one behind the other, in one of which the thread is stopped.
void compute(lamina::Rest<Time>& rest, int num_jobs, Nanoseconds stopped) {
  for (int i = 0; i < num_jobs; i++) {
    world.now += 100us, world.used += 100us;
    if (i == num_jobs / 2) world.now += stopped;
    rest.after_job();
  }
}

}  // namespace

int main() {
  lamina::Rest<Time> rest;
  compute(rest, 100000, 0us);
  require(world.rests.empty(), "busy");
  for (int i = 0; i < 1000; i++) compute(rest, 20, 600us);
  require(world.rests.empty(), "short-stops");
  world.now += 10s;  // asleep
  rest.begin();
  compute(rest, 100, 0us);
  require(world.rests.empty(), "sleep");
  for (int i = 0; i < 6; i++) compute(rest, 40, 3ms);
  const std::vector<Nanoseconds> longer{5ms, 10ms, 20ms, 40ms, 80ms, 160ms};
  require(world.rests == longer, "longer-each-time");
  compute(rest, 40, 3ms);
  require(world.rests.back() == 160ms, "never-longer-than-the-longest");
  for (int i = 0; i < 6; i++) compute(rest, 4000, 3ms);
  const std::vector<Nanoseconds> shorter{80ms, 40ms, 20ms, 10ms, 5ms, 5ms};
  require(std::vector<Nanoseconds>(world.rests.end() - 6, world.rests.end()) == shorter, "short-where-stops-are-rare");
  for (int i = 0; i < 7; i++) compute(rest, 40, 3ms);
  require(world.rests.back() == 160ms, "longer-once-more");
  compute(rest, 40000, 3ms);  // behind 2 s
  require(world.rests.back() == 5ms, "short-after-long-quiet");
}
