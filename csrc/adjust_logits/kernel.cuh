// Logits with biases and exclusions applied and less the penalties, by what was said so far.
//
// A block takes a slice of the vocabulary for one row. It goes through all tokens of the row and notes in shared
// memory, an entry an id, which are in the prompt and how often they are in the answer; then it reads the slice's
// logits once. So nothing is sorted, no sum has an order, and a row's numbers are the formula's bit for bit.
#pragma once

#include "launch.cuh"

namespace lamina {

constexpr int kAdjustThreads = 512, kSlice = 8192;
constexpr uint32_t kInPrompt = 1u << 31, kExcluded = 1u << 30, kTimes = kExcluded - 1;

template <typename T>
struct Adjust {
  const T* logits;         // [any number, num_ids and perhaps more], rows row_stride apart
  const int64_t* rows;     // [num_rows], as slots, lengths and num_prompt
  const int32_t* history;  // [any number of slots, history_stride]
  const int64_t *slots, *lengths;
  const int32_t* num_prompt;
  const float* penalties;   // [3, num_rows]: repetition, frequency, presence
  const int32_t* bias_ids;  // [num_rows, num_biases]
  const float* biases;
  const int32_t* allowed;    // [num_rows, num_words]
  const int32_t* bad_words;  // [num_rows, num_bad_words, longest], each at the right, -1 before it
  const int32_t* banned;     // [num_rows, num_banned]
  float* out;                // [num_rows, width], rows out_stride apart
  int64_t row_stride, history_stride, out_stride;
  int num_rows, num_biases, num_words, num_bad_words, longest, num_banned, num_ids, width;
};

// As the caller packs them: 8 bytes each, strides in elements.
struct AdjustLogitsArguments {
  const void* logits;
  int64_t row_stride;
  const int64_t* rows;
  const int32_t* history;
  int64_t history_stride;
  const int64_t *slots, *lengths;
  const int32_t* num_prompt;
  const float* penalties;
  const int32_t* bias_ids;
  const float* biases;
  int64_t num_biases;
  const int32_t* allowed;
  int64_t num_words;
  const int32_t* bad_words;
  int64_t num_bad_words, longest;
  const int32_t* banned;
  int64_t num_banned;
  float* out;
  int64_t out_stride, num_rows, num_ids, width, dtype;
  cudaStream_t stream;
};

template <typename T>
Adjust<T> unpacked(const AdjustLogitsArguments& p) {
  Adjust<T> args;
  args.logits = static_cast<const T*>(p.logits), args.rows = p.rows, args.history = p.history;
  args.slots = p.slots, args.lengths = p.lengths, args.num_prompt = p.num_prompt, args.penalties = p.penalties;
  args.bias_ids = p.bias_ids, args.biases = p.biases, args.allowed = p.allowed;
  args.bad_words = p.bad_words, args.banned = p.banned, args.out = p.out;
  args.row_stride = p.row_stride, args.history_stride = p.history_stride, args.out_stride = p.out_stride;
  args.num_rows = narrow(p.num_rows), args.num_biases = narrow(p.num_biases);
  args.num_words = narrow(p.num_words), args.num_bad_words = narrow(p.num_bad_words);
  args.longest = narrow(p.longest), args.num_banned = narrow(p.num_banned);
  args.num_ids = narrow(p.num_ids), args.width = narrow(p.width);
  return args;
}

template <typename T>
struct Row {
  const Adjust<T>& args;
  uint32_t* notes;  // [kSlice]
  float* biases;    // [kSlice], where there are any
  int64_t row;
  int first;  // id of the slice
  const int32_t* tokens;
  int length;

  __device__ __forceinline__ bool holds(int id) const {
    return id >= first && id < first + kSlice && id < args.num_ids;
  }

  __device__ __forceinline__ void exclude(int id) const {
    if (holds(id)) atomicOr(&notes[id - first], kExcluded);
  }

  __device__ __forceinline__ void note_tokens() const {
    const int num_prompt = args.num_prompt[row];
    for (int i = static_cast<int>(threadIdx.x); i < length; i += kAdjustThreads) {
      const int id = tokens[i];
      if (!holds(id)) continue;
      if (i < num_prompt) {
        atomicOr(&notes[id - first], kInPrompt);
      } else {
        atomicAdd(&notes[id - first], 1u);
      }
    }
  }

  // Whether all of a word but its last id came last.
  __device__ __forceinline__ bool is_met(const int32_t* word) const {
    for (int i = 0; i < args.longest - 1; ++i) {
      const int place = length - args.longest + 1 + i;
      if (word[i] >= 0 && (place < 0 || tokens[place] != word[i])) return false;
    }
    return true;
  }

  __device__ __forceinline__ void note_exclusions() const {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < args.num_banned; i += kAdjustThreads) exclude(args.banned[row * args.num_banned + i]);
    for (int i = thread; i < args.num_bad_words; i += kAdjustThreads) {
      const int32_t* word = args.bad_words + (row * args.num_bad_words + i) * args.longest;
      const int id = word[args.longest - 1];
      if (holds(id) && is_met(word)) exclude(id);
    }
  }

  __device__ __forceinline__ void note_biases() const {
    for (int i = static_cast<int>(threadIdx.x); i < args.num_biases; i += kAdjustThreads) {
      const int id = args.bias_ids[row * args.num_biases + i];
      if (holds(id)) biases[id - first] = args.biases[row * args.num_biases + i];
    }
  }

  __device__ __forceinline__ bool is_allowed(int id) const {
    return args.num_words == 0 || (args.allowed[row * args.num_words + id / 32] >> (id % 32) & 1) != 0;
  }

  __device__ __forceinline__ float adjusted(float score, int id, float repetition, float frequency,
                                            float presence) const {
    const uint32_t note = notes[id - first], times = note & kTimes;
    if (args.num_biases > 0) score += biases[id - first];
    if ((note & kExcluded) != 0 || !is_allowed(id)) score = -INFINITY;
    // each operation rounded by itself, as the formula's are
    if ((note & ~kExcluded) != 0) score = score > 0.0f ? __fdiv_rn(score, repetition) : __fmul_rn(score, repetition);
    if (times != 0) score = __fsub_rn(__fsub_rn(score, __fmul_rn(frequency, static_cast<float>(times))), presence);
    return score;
  }
};

template <typename T>
__global__ void __launch_bounds__(kAdjustThreads) adjust_logits_kernel(Adjust<T> args) {
  extern __shared__ uint32_t memory[];
  const int64_t own = blockIdx.y;
  Row<T> row{args,
             memory,
             reinterpret_cast<float*>(memory + kSlice),
             own,
             static_cast<int>(blockIdx.x) * kSlice,
             args.history + args.slots[own] * args.history_stride,
             static_cast<int>(args.lengths[own])};
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kSlice; i += kAdjustThreads) {
    row.notes[i] = 0;
    if (args.num_biases > 0) row.biases[i] = 0.0f;
  }
  __syncthreads();
  row.note_tokens();
  row.note_exclusions();
  row.note_biases();
  __syncthreads();
  const float repetition = args.penalties[own], frequency = args.penalties[args.num_rows + own];
  const float presence = args.penalties[2 * static_cast<int64_t>(args.num_rows) + own];
  const T* from = args.logits + args.rows[own] * args.row_stride;
  float* to = args.out + own * args.out_stride;
  for (int id = row.first + thread; id < args.width && id < row.first + kSlice; id += kAdjustThreads) {
    const bool is_id = id < args.num_ids;
    to[id] = is_id ? row.adjusted(static_cast<float>(from[id]), id, repetition, frequency, presence) : -INFINITY;
  }
}

}  // namespace lamina
