// The C entry point of sample on CUDA.
#include "kernel.cuh"
#include "launch_shared.cuh"

namespace lamina {

template <typename T, int kWidth>
int sample(const Sample<T>& args, bool are_chunks_known, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(args.num_rows);
  if (!are_chunks_known) {
    const bool are_many = args.num_rows >= 16;
    const int each = are_many ? 4 : 1;  // chunks a warp
    const dim3 grid(static_cast<unsigned>(ceil_div(args.num_chunks, kScanWarps * each)), rows);
    const auto scan = are_many ? scan_chunks<T, kWidth, 4> : scan_chunks<T, kWidth, 1>;
    if (const int error = launch_pdl(scan, grid, dim3(kScanWarps * kWarp), stream, args)) return error;
  }
  const size_t shared_bytes = sizeof(Shared) + 2 * sizeof(float) * static_cast<size_t>(args.num_chunks);
  const auto kernel = choose_tokens<T, kWidth>;
  if (const cudaError_t error = allow_all_shared(reinterpret_cast<const void*>(kernel))) return error;
  return launch_clusters(kHasPdl, 1, kernel, dim3(rows), dim3(kBlock), shared_bytes, stream, args);
}

}  // namespace lamina

extern "C" {
int64_t sample_arguments_size() { return sizeof(lamina::SampleArguments); }

int sample(const lamina::SampleArguments* p) {
  return lamina::with_dtype(p->dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    const auto args = lamina::unpacked<T>(*p);
    const bool are_known = p->are_chunks_known != 0;
    return p->is_aligned ? lamina::sample<T, lamina::kVecWidth<T>>(args, are_known, p->stream)
                         : lamina::sample<T, 1>(args, are_known, p->stream);
  });
}
}
