// The C entry points of linear_int8, and how its work is spread over threads.
#include "bf16.h"
#include "kernel.h"

#if defined(LAMINA_INT8_BY_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// As the caller packs them: 8 bytes each, strides in elements.
struct LinearInt8Arguments {
  const void* x;
  const int8_t* weight;
  const float* scale;
  const void* bias;
  void* out;
  int64_t x_stride, num_tokens, n, k, threads;
};

namespace lamina {
namespace {

constexpr double kMinParallelWork = 1 << 16;  // weights below which waking threads costs more than it saves

// A function of the thread's number and of how many there are, on one thread or on all.
template <typename Work>
void on_threads(const LinearInt8Arguments& p, Work work) {
  [[maybe_unused]] const int threads = static_cast<int>(p.threads);
  [[maybe_unused]] const double weights = static_cast<double>(p.n) * static_cast<double>(p.k);
#pragma omp parallel num_threads(threads) if (threads > 1 && weights > kMinParallelWork)
  work();
}

template <typename T>
LinearInt8<T> typed(const LinearInt8Arguments& p) {
  return {static_cast<const T*>(p.x),
          p.weight,
          p.scale,
          static_cast<const T*>(p.bias),
          static_cast<T*>(p.out),
          p.x_stride,
          p.num_tokens,
          p.n,
          p.k};
}

template <typename T>
void multiply(const LinearInt8Arguments& p) {
  const LinearInt8<T> a = typed<T>(p);
  const int64_t width = plain::padded(a.k), num_groups = a.num_groups();
  thread_local Buffer buffer;
  float* x = buffer.reserve(a.num_tokens * width);
  on_threads(p, [&] {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < a.num_tokens; token++) plain::widen(a, token, x + token * width);
#pragma omp for schedule(static)
    for (int64_t group = 0; group < num_groups; group++) plain::multiply_group(a, x, group);
  });
}

#if defined(LAMINA_INT8_BY_TILES)
// Linux gives the registers of tiles to processes that ask.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

void multiply_tiles(const LinearInt8Arguments& p) {
  const LinearInt8<BFloat16> a = typed<BFloat16>(p);
  const bf16::Tables tables;
  const int64_t steps = bf16::num_steps(a.k), step_size = 2 * bf16::tiles::kTile;
  const int64_t num_tiles = (a.num_tokens + bf16::tiles::kTokens - 1) / bf16::tiles::kTokens;
  const int64_t num_groups = a.num_groups(), num_pairs = num_groups / 2;
  thread_local Buffer packed;
  auto* x = reinterpret_cast<BFloat16*>(packed.reserve(num_tiles * steps * step_size / 2));
  on_threads(p, [&] {
    thread_local Buffer own;
    auto* scratch = reinterpret_cast<BFloat16*>(own.reserve(steps * step_size));
    const bf16::tiles::Configured configured;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_tiles * steps; i++) bf16::tiles::pack(a, i / steps, i % steps, x + i * step_size);
#pragma omp for schedule(static)
    for (int64_t pair = 0; pair < num_pairs; pair++) bf16::tiles::multiply_groups<2>(a, tables, x, pair * 2, scratch);
#pragma omp single
    if (num_groups % 2) bf16::tiles::multiply_groups<1>(a, tables, x, num_groups - 1, scratch);
  });
}
#endif

#if defined(LAMINA_INT8_AS_BF16)
template <int tokens>
void multiply_few(const LinearInt8Arguments& p) {
  const LinearInt8<BFloat16> a = typed<BFloat16>(p);
  const bf16::Tables tables;
  const int64_t width = bf16::num_steps(a.k) * bf16::kStep, num_groups = a.num_groups();
  thread_local Buffer packed;
  auto* x = reinterpret_cast<BFloat16*>(packed.reserve(tokens * width / 2));
  for (int64_t token = 0; token < tokens; token++) bf16::few::pack(a, token, x + token * width);
  on_threads(p, [&] {
#pragma omp for schedule(static)
    for (int64_t group = 0; group < num_groups; group++) bf16::few::multiply_group<tokens>(a, tables, x, group);
  });
}
#endif

void multiply_bf16(const LinearInt8Arguments& p) {
#if defined(LAMINA_INT8_AS_BF16)
  if (p.num_tokens == 1) return multiply_few<1>(p);
#if defined(LAMINA_INT8_BY_TILES)
  if (may_use_tiles()) return multiply_tiles(p);
#endif
  if (p.num_tokens == 2) return multiply_few<2>(p);
  if (p.num_tokens == 3) return multiply_few<3>(p);
#endif
  multiply<BFloat16>(p);
}

}  // namespace
}  // namespace lamina

extern "C" {
int64_t linear_int8_arguments_size() { return sizeof(LinearInt8Arguments); }

void linear_int8_float32(const LinearInt8Arguments* p) { lamina::multiply<float>(*p); }

void linear_int8_float16(const LinearInt8Arguments* p) { lamina::multiply<lamina::Float16>(*p); }

void linear_int8_bfloat16(const LinearInt8Arguments* p) { lamina::multiply_bf16(*p); }
}
