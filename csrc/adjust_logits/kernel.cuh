// Logits with biases, exclusions and penalties applied, by the tokens of prompt and answer so far.
//
// A block takes a slice of the vocabulary for one row. It asks for the slice's logits, goes through all tokens of the
// row and notes in shared memory, an entry an id, which are in the prompt and how often they are in the answer. So
// nothing is sorted, no sum has an order, and a row's numbers are the formula's bit for bit. Each warp leaves what
// sample would have to find by reading the scores again: the largest of a chunk and its summed odds.
#pragma once

#include "chunk.cuh"
#include "vec.cuh"

namespace lamina {

constexpr int kAdjustThreads = 512, kAdjustWarps = kAdjustThreads / kWarp, kSlice = 8192;
constexpr int kOwnChunks = kSlice / kChunk / kAdjustWarps;  // of a warp
constexpr uint32_t kInPrompt = 1u << 31, kExcluded = 1u << 30, kTimes = kExcluded - 1;

template <typename T>
struct Adjust {
  const T* logits;           // [any number, num_ids and perhaps more], rows row_stride apart
  const int64_t* rows;       // [num_rows], as slots, num_prompt and temperature
  int32_t* history;          // [any number of slots, history_stride]
  const int64_t* slots;      // of the history
  const int64_t* positions;  // a row's at its step_row of rows, as last_tokens and banned
  const int32_t *token_ids, *last_tokens, *num_prompt;
  const float* penalties;   // [3, num_rows]: repetition, frequency, presence
  const int32_t* bias_ids;  // [num_rows, num_biases]
  const float* biases;
  const int32_t* allowed;    // [num_rows, num_words]
  const int32_t* bad_words;  // [num_rows, num_bad_words, longest], each at the right, -1 before it
  const int32_t* banned;     // [any number, num_banned]
  const float* temperature;
  float* out;      // [num_rows, width], rows out_stride apart
  float2* chunks;  // [num_rows, num_chunks]
  int64_t row_stride, history_stride, out_stride;
  int num_rows, num_biases, num_words, num_bad_words, longest, num_banned, num_ids, width, num_chunks;
  bool reads_vectors;
};

// As the caller packs them: 8 bytes each, strides in elements.
struct AdjustLogitsArguments {
  const void* logits;
  int64_t row_stride, reads_vectors;
  const int64_t* rows;
  int32_t* history;
  int64_t history_stride;
  const int64_t *slots, *positions;
  const int32_t *token_ids, *last_tokens, *num_prompt;
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
  const float* temperature;
  float* out;
  int64_t out_stride, writes_vectors;
  float2* chunks;
  int64_t num_chunks, num_rows, num_ids, width, dtype;
  cudaStream_t stream;
};

template <typename T>
Adjust<T> unpacked(const AdjustLogitsArguments& p) {
  Adjust<T> args;
  args.logits = static_cast<const T*>(p.logits), args.rows = p.rows, args.history = p.history;
  args.slots = p.slots, args.positions = p.positions, args.token_ids = p.token_ids;
  args.last_tokens = p.last_tokens, args.num_prompt = p.num_prompt, args.penalties = p.penalties;
  args.bias_ids = p.bias_ids, args.biases = p.biases, args.allowed = p.allowed;
  args.bad_words = p.bad_words, args.banned = p.banned, args.temperature = p.temperature;
  args.out = p.out, args.chunks = p.chunks;
  args.row_stride = p.row_stride, args.history_stride = p.history_stride, args.out_stride = p.out_stride;
  args.num_rows = narrow(p.num_rows), args.num_biases = narrow(p.num_biases);
  args.num_words = narrow(p.num_words), args.num_bad_words = narrow(p.num_bad_words);
  args.longest = narrow(p.longest), args.num_banned = narrow(p.num_banned);
  args.num_ids = narrow(p.num_ids), args.width = narrow(p.width), args.num_chunks = narrow(p.num_chunks);
  args.reads_vectors = p.reads_vectors != 0;
  return args;
}

template <typename T>
struct Row {
  const Adjust<T>& args;
  uint32_t* notes;        // [kSlice]
  float* biases;          // [kSlice], where there are any
  int64_t row, step_row;  // among those to adjust, among all of the step
  int first;              // id of the slice
  int32_t* tokens;
  int length;
  int32_t newest;  // the last of them, which the history may not have yet

  __device__ __forceinline__ bool holds(int id) const {
    return id >= first && id < first + kSlice && id < args.num_ids;
  }

  __device__ __forceinline__ void exclude(int id) const {
    if (holds(id)) atomicOr(&notes[id - first], kExcluded);
  }

  __device__ __forceinline__ int32_t token(int i) const { return i == length - 1 ? newest : tokens[i]; }

  __device__ __forceinline__ void note_tokens() const {
    const int num_prompt = args.num_prompt[row];
    for (int i = static_cast<int>(threadIdx.x); i < length; i += kAdjustThreads) {
      const int id = token(i);
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
      const int earlier = length - args.longest + 1 + i;
      if (word[i] >= 0 && (earlier < 0 || token(earlier) != word[i])) return false;
    }
    return true;
  }

  __device__ __forceinline__ void note_exclusions() const {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < args.num_banned; i += kAdjustThreads) exclude(args.banned[step_row * args.num_banned + i]);
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

  __device__ __forceinline__ float adjusted(float score, int id, uint32_t note, float repetition, float frequency,
                                            float presence) const {
    const uint32_t times = note & kTimes;
    if (args.num_biases > 0) score += biases[id - first];
    // NaN and infinity stay: an exclusion is not to hide that a row is broken
    if (((note & kExcluded) != 0 || !is_allowed(id)) && score < INFINITY) score = -INFINITY;
    // each operation rounded by itself, as the formula's are
    if ((note & ~kExcluded) != 0) score = score > 0.0f ? __fdiv_rn(score, repetition) : __fmul_rn(score, repetition);
    if (times != 0) score = __fsub_rn(__fsub_rn(score, __fmul_rn(frequency, static_cast<float>(times))), presence);
    return score;
  }
};

// Neighbours that are moved by one instruction.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Few {
  T values[kWidth];
};

// A lane's logits of a chunk, as they lie in memory; those beyond the ids are not read.
template <typename T, int kWidth>
struct OwnLogits {
  Few<T, kWidth> few[kEach / kWidth];

  __device__ __forceinline__ void read(const Adjust<T>& args, int64_t step_row, int first) {
    const T* from = args.logits + step_row * args.row_stride;
#pragma unroll
    for (int i = 0; i < kEach / kWidth; ++i) {
      const int id = first + offset_in_chunk<kWidth>(i * kWidth);
      if (args.reads_vectors) {
        if (id < args.num_ids) few[i] = *reinterpret_cast<const Few<T, kWidth>*>(from + id);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (id + j < args.num_ids) few[i].values[j] = from[id + j];
        }
      }
    }
  }
};

// Writes the scores of a chunk, -inf beyond the ids, and what sample wants to know of it.
template <typename T, int kWidth>
__device__ __forceinline__ void adjust_chunk(const Row<T>& row, const OwnLogits<T, kWidth>& logits, int first) {
  const Adjust<T>& args = row.args;
  const float repetition = args.penalties[row.row], frequency = args.penalties[args.num_rows + row.row];
  const float presence = args.penalties[2 * static_cast<int64_t>(args.num_rows) + row.row];
  float* to = args.out + row.row * args.out_stride + first;
  float values[kEach];
#pragma unroll
  for (int i = 0; i < kEach / kWidth; ++i) {
    const int offset = offset_in_chunk<kWidth>(i * kWidth);
    const auto notes = *reinterpret_cast<const Few<uint32_t, kWidth>*>(row.notes + first - row.first + offset);
    float some[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int id = first + offset + j;
      const auto logit = static_cast<float>(logits.few[i].values[j]);
      some[j] =
          id < args.num_ids ? row.adjusted(logit, id, notes.values[j], repetition, frequency, presence) : -INFINITY;
      values[i * kWidth + j] = some[j];
    }
    if (first + offset < args.width) store(to + offset, from_floats<float>(some));
  }
  if (first / kChunk >= args.num_chunks) return;
  const float2 summary = summary_of(values, args.temperature[row.row]);
  if (threadIdx.x % kWarp == 0) args.chunks[row.row * args.num_chunks + first / kChunk] = summary;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kAdjustThreads, 3) adjust_logits_kernel(Adjust<T> args) {
  extern __shared__ uint4 memory[];
  const int64_t own = blockIdx.y, step_row = args.rows[own];
  const int slice = static_cast<int>(blockIdx.x) * kSlice, thread = static_cast<int>(threadIdx.x);
  const int first = slice + thread / kWarp * kOwnChunks * kChunk;
  OwnLogits<T, kWidth> logits[kOwnChunks];
#pragma unroll
  for (int i = 0; i < kOwnChunks; ++i) logits[i].read(args, step_row, first + i * kChunk);
  auto* notes = reinterpret_cast<uint32_t*>(memory);
  const Row<T> row{args,
                   notes,
                   reinterpret_cast<float*>(notes + kSlice),
                   own,
                   step_row,
                   slice,
                   args.history + args.slots[own] * args.history_stride,
                   static_cast<int>(args.positions[step_row]),
                   args.token_ids[args.last_tokens[step_row]]};
  for (int i = thread; i < kSlice / 4 * (args.num_biases > 0 ? 2 : 1); i += kAdjustThreads) memory[i] = {0, 0, 0, 0};
  __syncthreads();
  row.note_tokens();
  row.note_exclusions();
  row.note_biases();
  if (blockIdx.x == 0 && thread == 0) row.tokens[row.length - 1] = row.newest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwnChunks; ++i) {
    if (first + i * kChunk < args.width) adjust_chunk(row, logits[i], first + i * kChunk);
  }
}

}  // namespace lamina
