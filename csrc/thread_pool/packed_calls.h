// Kernels called one after another, as a step on a CPU does again and again, with nothing between them.
#pragma once

#include <cstdint>

// Of an entry point that takes one packed argument.
struct PackedCall {
  int64_t (*entry)(const void* arguments);
  const void* arguments;
  int64_t result;  // that is expected
};

// Makes the calls up to the first that returns another result; how many returned theirs.
extern "C" int64_t lamina_make_calls(const PackedCall* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (calls[i].entry(calls[i].arguments) != calls[i].result) return i;
  return count;
}
