// out = x @ w.T + bias with weights of four bits, w = (q - 8) * scale + zero rounded to x's type, on raw pointers.
//
// Of each row and group the sixteen values that its weights can have are made once; weights then look theirs up. For
// few rows of x that is done in registers, for many a unit of weights is written out and multiplied as a dense one.
#pragma once

#include "gemm.h"
#include "nibbles.h"

namespace lamina {

constexpr int kFewTokens = 4;  // rows of x up to which weights are looked up again for each four of them
constexpr int kOffset = 8;     // of the four bits

template <typename T>
struct LinearW4A16 {
  const T* x;
  int64_t x_token;  // stride; a row is contiguous
  int64_t tokens;
  const uint8_t* weight;  // [rows, depth / 2]
  const T* scale;         // [rows, groups]
  const T* zero;          // the same, or null
  const T* bias;          // or null
  T* out;                 // contiguous
  int64_t rows, depth, group;

  int64_t groups() const { return (depth + group - 1) / group; }

  Table table(int64_t row, int64_t of_group) const {
    const int64_t at = row * groups() + of_group;
    const float scale_of = to_float(scale[at]), zero_of = zero == nullptr ? 0.0f : to_float(zero[at]);
    alignas(64) float values[16];
    for (int i = 0; i < 16; i += kLanes) {
      const Vec whole = __builtin_convertvector(lane_ids() + (i - kOffset), Vec);
      lamina::store(values + i, rounded<T>(whole * scale_of + zero_of));
    }
    return Table(values);
  }

  bool run(Method method, int threads) const {
    if (tokens == 0 || rows == 0) return true;
    if (tokens <= kFewTokens) return multiply_few(threads), true;
    if (method == Method::kDot) return multiply_many(DotKernel<T, T>(depth), threads), true;
#if defined(LAMINA_AMX)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (has_amx()) return multiply_many(AmxKernel(depth), threads), true;
    }
#endif
    return false;
  }

 private:
  using Pairs = PairOps<T>;
  static constexpr int kRowsAtOnce = 4;

  void multiply_few(int threads) const {
    thread_local Buffer buffer;
    // a group's columns begin at a whole step, zeros behind their end
    const int64_t of_group = (group + Pairs::kStep - 1) / Pairs::kStep * Pairs::kStep, of_token = groups() * of_group;
    auto* packed = reinterpret_cast<typename Pairs::Packed*>(buffer.reserve(tokens * of_token));
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t g = 0; g < groups(); g++)
        for (int64_t k = 0; k < of_group; k += Pairs::kStep)
          Pairs::pack(x + t * x_token + g * group + k, std::min(group - k, depth - g * group - k),
                      packed + t * of_token + g * of_group + k);
    const int64_t num_chunks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
    parallel_chunks(num_chunks, tokens * rows * depth > kMinParallelWork ? threads : 1, [&](int64_t chunk) {
      const int64_t row = chunk * kRowsAtOnce;
      float sums[kRowsAtOnce][kFewTokens];
      switch (tokens) {
        case 1:
          multiply_rows<1>(row, packed, of_group, of_token, sums);
          break;
        case 2:
          multiply_rows<2>(row, packed, of_group, of_token, sums);
          break;
        case 3:
          multiply_rows<3>(row, packed, of_group, of_token, sums);
          break;
        default:
          multiply_rows<4>(row, packed, of_group, of_token, sums);
      }
      for (int r = 0; r < std::min<int64_t>(kRowsAtOnce, rows - row); r++)
        for (int64_t t = 0; t < tokens; t++)
          store_one(out + t * rows + row + r, sums[r][t] + (bias == nullptr ? 0.0f : to_float(bias[row + r])));
    });
  }

  template <int count>
  void multiply_rows(int64_t row, const typename Pairs::Packed* packed, int64_t of_group, int64_t of_token,
                     float (*sums)[kFewTokens]) const {
    Vec sum[kRowsAtOnce][count] = {};
    for (int64_t g = 0; g < groups(); g++) {
      const int64_t columns = std::min(group, depth - g * group);
      for (int r = 0; r < kRowsAtOnce; r++) {
        const int64_t of_row = std::min(row + r, rows - 1);
        const Table values = table(of_row, g);
        const uint8_t* from = weight + (of_row * depth + g * group) / 2;
        __builtin_prefetch(from + kRowsAtOnce * depth / 2, 0, 2);
        for (int64_t k = 0; k < columns; k += Pairs::kStep) {
          const IntVec bytes = load_bytes(from + k / 2, (columns - k) / 2);
          const Vec even = values[bytes], odd = values[bytes >> 4];
          for (int t = 0; t < count; t++)
            sum[r][t] = Pairs::multiply_add(sum[r][t], even, odd, packed + t * of_token + g * of_group + k);
        }
      }
    }
    const auto add = [](Vec a, Vec b) { return a + b; };
    for (int r = 0; r < kRowsAtOnce; r++)
      for (int t = 0; t < count; t++) sums[r][t] = reduce(sum[r][t], add);
  }

  // The units of gemm.h's `multiply`, each written out for the thread that asks.
  struct Written {
    const LinearW4A16& gemm;

    int64_t count() const { return (gemm.rows + 2 * kLanes - 1) / (2 * kLanes); }
    int64_t row(int64_t unit) const { return unit * 2 * kLanes; }
    Unit<T> operator[](int64_t unit) const {
      thread_local Buffer buffer;
      const int64_t stride = gemm.depth + 64 / static_cast<int64_t>(sizeof(T));  // no power of two
      auto* to = reinterpret_cast<T*>(buffer.reserve(2 * kLanes * stride * sizeof(T) / sizeof(float)));
      Unit<T> made{{{to, stride, 1}, {to, stride, 1}}, 0};
      const int64_t count = std::min<int64_t>(2 * kLanes, gemm.rows - row(unit));
      for (int64_t r = 0; r < count; r++) gemm.write_out(row(unit) + r, to + r * stride);
      made.strips[0].count = static_cast<int>(std::min<int64_t>(kLanes, count));
      if (count > kLanes) made.strips[1] = {to + kLanes * stride, stride, static_cast<int>(count - kLanes)};
      return made;
    }
    Unit<T> ahead(int64_t) const { return {{}, 0, 0}; }  // it is in the cache when it is written out
  };

  void write_out(int64_t row, T* to) const {
    for (int64_t g = 0; g < groups(); g++) {
      const int64_t columns = std::min(group, depth - g * group);
      const Table values = table(row, g);
      const uint8_t* from = weight + (row * depth + g * group) / 2;
      for (int64_t k = 0; k < columns; k += 2 * kLanes) {
        const IntVec bytes = load_bytes(from + k / 2, (columns - k) / 2);
        store_pairs(to + g * group + k, values[bytes], values[bytes >> 4], columns - k);
      }
    }
  }

  template <typename Kernel>
  void multiply_many(const Kernel& kernel, int threads) const {
    multiply(kernel, Written{*this}, rows * depth, tokens, threads,
             Rows{false, [this](int64_t token, T*) { return x + token * x_token; }},
             [this](int64_t token, int64_t row, auto... sums) { write(token, row, sums...); });
  }

  void write(int64_t token, int64_t row, Vec first, Vec second) const {
    store_rows(token, row, first);
    if (row + kLanes < rows) store_rows(token, row + kLanes, second);
  }

  void write(int64_t token, int64_t row, Vec sums) const { store_rows(token, row, sums); }

  void store_rows(int64_t token, int64_t row, Vec sums) const {
    const int64_t count = rows - row;
    if (bias != nullptr) sums += load_some(bias + row, count);
    store_some(out + token * rows + row, sums, count);
  }
};

}  // namespace lamina
