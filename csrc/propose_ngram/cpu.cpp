// The C entry point of propose_ngram.
#include "kernel.h"

// As the caller packs them: 8 bytes each.
struct ProposeNgramArguments {
  const int32_t* tokens;
  int64_t block_size;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* num_computed;
  const int32_t* newest;
  int32_t* out;
  int64_t num_rows, k, min_ngram, max_ngram;
};

extern "C" {
int64_t propose_ngram_arguments_size() { return sizeof(ProposeNgramArguments); }

int64_t propose_ngram(const ProposeNgramArguments* p) {
  for (int64_t row = 0; row < p->num_rows; row++) {
    const lamina::PagedRow own{p->tokens, p->block_tables + row * p->table_stride, p->block_size, p->num_computed[row],
                               p->newest[row]};
    lamina::propose_ngram(own, p->min_ngram, p->max_ngram, p->out + row * p->k, p->k);
  }
  return 0;
}
}
