// The C entry point of propose_ngram on CUDA.
#include "kernel.cuh"

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
  cudaStream_t stream;
};

extern "C" {
int64_t propose_ngram_arguments_size() { return sizeof(ProposeNgramArguments); }

int propose_ngram(const ProposeNgramArguments* p) {
  const lamina::ProposeNgram args{p->tokens,
                                  lamina::narrow(p->block_size),
                                  p->block_tables,
                                  p->table_stride,
                                  p->num_computed,
                                  p->newest,
                                  p->out,
                                  p->num_rows,
                                  lamina::narrow(p->k),
                                  lamina::narrow(p->min_ngram),
                                  lamina::narrow(p->max_ngram)};
  return lamina::propose_ngram(args, p->stream);
}
}
