// The C entry points of paged attention, and how its work is spread over threads.
#include <optional>
#include <vector>

#include "kernel.h"
#include "thread_pool.h"

namespace lamina {
namespace {

constexpr double kMinParallelWork = 3e5;         // multiply-adds below which waking threads costs more than it saves
constexpr int64_t kMinParallelFloats = 1 << 15;  // the same for what is merged
constexpr int kUnitsPerThread = 4;               // so that unequal units even out

struct Job {
  Tile tile;
  int first_split, last_split;
  int64_t parts;  // where its partial results start, one a (kv head, split); -1: it is finished in one go
  int splits() const { return last_split - first_split; }
  bool has_few_rows() const { return tile.rows <= kMaxRowsInParts; }
};

// Some kv heads of a job: one split of few rows, or all splits of many.
struct Unit {
  int job;
  Heads heads;
};

// The first sequence whose lengths or blocks do not fit the cache, or -1.
template <typename T>
int64_t find_invalid(const Attention<T>& a, int64_t num_tokens, int64_t num_blocks, int64_t max_blocks) {
  for (int64_t seq = 0; seq < a.num_seqs; seq++) {
    int64_t length = a.seq_lens[seq], start = a.query_start_loc[seq], end = a.query_start_loc[seq + 1];
    if (length == 0) continue;
    if (length < 0 || start < 0 || end < start || end > num_tokens || end - start > length) return seq;
    int64_t used = (length + a.block_size - 1) / a.block_size;
    int64_t first = a.oldest(length - (end - start)) / a.block_size;
    if (used > max_blocks) return seq;
    for (int64_t i = first; i < used; i++) {
      int64_t block = a.block_tables[seq * a.block_tables_stride + i];
      if (block < 0 || block >= num_blocks) return seq;
    }
  }
  return -1;
}

template <typename T>
class Plan {
 public:
  std::vector<Job> jobs;
  std::vector<Unit> units;
  int64_t num_parts_floats = 0;
  double work = 0;

  void make(const Attention<T>& a, int threads) {
    jobs.clear(), units.clear(), num_parts_floats = 0, work = 0;
    for (int seq = 0; seq < a.num_seqs; seq++)
      if (a.seq_lens[seq] > 0) add_sequence(a, seq);
    for (size_t i = 0; i < jobs.size(); i++) add_units(a, static_cast<int>(i), heads_at_once(a, threads));
  }

 private:
  void add_sequence(const Attention<T>& a, int seq) {
    int rows = a.query_len(seq) * a.group();
    int64_t past = a.seq_lens[seq] - a.query_len(seq);
    for (int first = 0; first < rows; first += kMaxRows) {
      Tile tile{seq, first, std::min(kMaxRows, rows - first)};
      int64_t oldest = a.oldest(past + first / a.group());
      int64_t end = past + (first + tile.rows - 1) / a.group() + 1;
      jobs.push_back(
          {tile, static_cast<int>(oldest / kSplitKeys), static_cast<int>((end + kSplitKeys - 1) / kSplitKeys), -1});
      work += 2.0 * tile.rows * (end - oldest) * a.head_dim * a.num_kv_heads;
    }
  }

  // Heads of a token are neighbours, and memory is read fastest in order: as many as a worker holds, but fewer where
  // threads would be left without work.
  int heads_at_once(const Attention<T>& a, int threads) const {
    if (threads == 1) return static_cast<int>(a.num_kv_heads);
    int64_t num_splits = 0;
    for (const Job& job : jobs) num_splits += job.splits();
    return std::clamp<int64_t>(num_splits * a.num_kv_heads / (threads * kUnitsPerThread), 1, a.num_kv_heads);
  }

  void add_units(const Attention<T>& a, int index, int most_heads) {
    Job& job = jobs[index];
    const int kv_heads = static_cast<int>(a.num_kv_heads);
    const int heads =
        job.has_few_rows() ? std::min(most_heads, Worker<T>::heads_at_once(a, job.tile.rows)) : most_heads;
    if (job.has_few_rows() && job.splits() > 1) {
      job.parts = num_parts_floats;
      num_parts_floats += Partial::size(job.tile.rows, a.padded_dim()) * job.splits() * kv_heads;
    }
    for (int split = job.first_split; split < (job.has_few_rows() ? job.last_split : job.first_split + 1); split++)
      for (int head = 0; head < kv_heads; head += heads)
        units.push_back({index, {job.tile, head, std::min(head + heads, kv_heads), split}});
  }
};

// The part of a job's results that a head and a split of the keys stand for.
template <typename T>
float* part_of(const Attention<T>& a, const Job& job, float* parts, int64_t head, int split) {
  return parts + job.parts + Partial::size(job.tile.rows, a.padded_dim()) * (head * job.splits() + split);
}

// One unit by a worker, which knows what probably follows.
template <typename T>
void attend_unit(const Attention<T>& a, Worker<T>& worker, const Job& job, const Heads& heads, const Unit* next,
                 float* parts) {
  if (!job.has_few_rows()) {
    for (int head = heads.first; head < heads.last; head++)
      worker.finish(job.tile, head, job.first_split, job.last_split);
    return;
  }
  worker.attend_heads(heads, next == nullptr ? nullptr : &next->heads, [&](int head, const Partial& result) {
    if (job.parts < 0) return worker.write(job.tile, head, result);
    float* part = part_of(a, job, parts, head, heads.split - job.first_split);
    Partial(part, job.tile.rows, a.padded_dim()).copy(result, job.tile.rows, a.padded_dim());
  });
}

// body(worker, chunk, next) for every chunk, by a worker a thread; next: the chunk that it probably takes then, or -1.
template <typename T, typename Body>
void each(const Attention<T>& a, int64_t num_chunks, int threads, const Body& body) {
  parallel(num_chunks, threads, [&](Chunks& chunks) {
    thread_local Buffer panels;
    Worker<T> worker(a, panels);
    std::optional<AmxAttention::Scope> scope;
    if (worker.by_amx()) scope.emplace();
    for (int64_t chunk; chunks.claim(chunk);) body(worker, chunk, chunks.next());
  });
}

template <typename T>
void run(const Attention<T>& a, int threads) {
  thread_local Plan<T> made;
  thread_local Buffer parts_buffer;
  made.make(a, threads);
  const Plan<T>& plan = made;  // of this thread, for others
  float* parts = parts_buffer.reserve(plan.num_parts_floats);
  if (plan.work <= kMinParallelWork) threads = 1;
  each(a, plan.units.size(), threads, [&](Worker<T>& worker, int64_t i, int64_t next) {
    const Unit& unit = plan.units[i];
    attend_unit(a, worker, plan.jobs[unit.job], unit.heads, next < 0 ? nullptr : &plan.units[next], parts);
  });
  if (plan.num_parts_floats == 0) return;
  if (plan.num_parts_floats <= kMinParallelFloats) threads = 1;
  each(a, plan.jobs.size() * a.num_kv_heads, threads, [&](Worker<T>& worker, int64_t i, int64_t) {
    const Job& job = plan.jobs[i / a.num_kv_heads];
    const int head = static_cast<int>(i % a.num_kv_heads);
    if (job.parts >= 0) worker.finish_parts(job.tile, head, part_of(a, job, parts, head, 0), job.splits());
  });
}

}  // namespace
}  // namespace lamina

// As the caller packs them: 8 bytes each, strides in elements.
struct PagedAttentionArguments {
  void* out;
  int64_t out_token, out_head, out_dim;
  const void* query;
  int64_t query_token, query_head, query_dim;
  const void* key_cache;
  int64_t key_block, key_token, key_head, key_dim;
  const void* value_cache;
  int64_t value_block, value_token, value_head, value_dim;
  const int32_t* block_tables;
  int64_t block_tables_row, block_tables_column;
  const int32_t *seq_lens, *query_start_loc;
  int64_t num_tokens, num_heads, head_dim, num_blocks, block_size, num_kv_heads, cache_head_dim;
  int64_t num_seqs, max_blocks, window, chunk, threads;
  int64_t stored;  // lamina::Stored: the caches
  double scale, soft_cap, value_scale;
};

namespace {

constexpr int64_t kDone = -1, kNotContiguous = -2;

// kDone, kNotContiguous, or the index of a sequence whose lengths or blocks do not fit; then nothing is written.
template <typename T>
int64_t paged_attention(const PagedAttentionArguments& p) {
  for (int64_t stride : {p.out_dim, p.query_dim, p.key_dim, p.value_dim, p.block_tables_column})
    if (stride != 1) return kNotContiguous;
  lamina::Attention<T> attention{
      static_cast<T*>(p.out),
      static_cast<const T*>(p.query),
      p.key_cache,
      p.value_cache,
      p.block_tables,
      p.seq_lens,
      p.query_start_loc,
      {0, p.out_token, p.out_head},
      {0, p.query_token, p.query_head},
      {p.key_block, p.key_token, p.key_head},
      {p.value_block, p.value_token, p.value_head},
      p.block_tables_row,
      p.num_seqs,
      p.num_heads,
      p.num_kv_heads,
      p.head_dim,
      p.block_size,
      static_cast<float>(p.scale),
      p.window,
      p.chunk,
      static_cast<float>(p.soft_cap),
      static_cast<lamina::Stored>(p.stored),
      static_cast<float>(p.value_scale),
  };
  int64_t invalid = lamina::find_invalid(attention, p.num_tokens, p.num_blocks, p.max_blocks);
  if (invalid >= 0) return invalid;
  lamina::run(attention, static_cast<int>(p.threads));
  return kDone;
}

}  // namespace

extern "C" {
int64_t paged_attention_arguments_size() { return sizeof(PagedAttentionArguments); }
int64_t paged_attention_float32(const PagedAttentionArguments* p) { return paged_attention<float>(*p); }
int64_t paged_attention_bfloat16(const PagedAttentionArguments* p) { return paged_attention<lamina::BFloat16>(*p); }
int64_t paged_attention_float16(const PagedAttentionArguments* p) { return paged_attention<lamina::Float16>(*p); }
}
