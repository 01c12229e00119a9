// The tokens that followed where the last ones of a row came before.
#pragma once

#include <cstdint>

namespace lamina {

// A row's tokens: those in its blocks, and the newest, which stands at `end`.
struct PagedRow {
  const int32_t* tokens;
  const int32_t* table;
  int64_t block_size, end;
  int32_t newest;

  int32_t at(int64_t place) const {
    if (place == end) return newest;
    return tokens[table[place / block_size] * block_size + place % block_size];
  }

  // How many tokens up to a place are the row's last ones, at most so many.
  int64_t length(int64_t place, int64_t most) const {
    int64_t length = 0;
    while (length < most && length <= place && at(place - length) == at(end - length)) ++length;
    return length;
  }
};

// out [k]: what came after the best place, -1 where there is none.
inline void propose_ngram(const PagedRow& row, int64_t min_ngram, int64_t max_ngram, int32_t* out, int64_t k) {
  int64_t longest = min_ngram - 1, best = -1;
  for (int64_t block = (row.end - 1) / row.block_size; row.end > 0 && block >= 0 && longest < max_ngram; --block) {
    const int32_t* held = row.tokens + row.table[block] * row.block_size;
    const int64_t first = block * row.block_size;
    int64_t place = first + row.block_size < row.end ? first + row.block_size : row.end;
    while (--place >= first && longest < max_ngram) {
      if (held[place - first] != row.newest) continue;
      const int64_t length = row.length(place, max_ngram);
      if (length > longest) longest = length, best = place;
    }
  }
  for (int64_t i = 0; i < k; ++i) out[i] = best < 0 ? -1 : row.at(best + 1 + i % (row.end - best));
}

}  // namespace lamina
