// Launches as csrc makes them, on devices that are none.
#include "gemm_config.cuh"
#include "launch_shared.cuh"
#include "pdl.cuh"

static void first(int) {}
static void second(int) {}

extern "C" {
void set_device(int device) { fake::device = device; }
void set_capture(int is_active, int error) {
  fake::capture = is_active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  fake::of_capture = static_cast<cudaError_t>(error);
}
int num_settings() { return fake::num_settings; }
int num_launches() { return fake::num_launches; }
int is_pdl() { return fake::num_pdl; }
int num_cluster() { return fake::num_cluster; }
int last_error() { return cudaGetLastError(); }
int allow(int which) { return lamina::allow_all_shared(reinterpret_cast<const void*>(which == 0 ? first : second)); }
int launch(int which, int64_t shared, int cluster) {
  return lamina::launch_clusters_pdl(cluster, which == 0 ? first : second, dim3(1), dim3(32), shared, nullptr, 1);
}
int takes(const lamina::GemmConfig* config, int is_gated) {
  const auto function = [](auto, auto) -> int { return cudaSuccess; };
  return (is_gated ? lamina::with_gemm_config<true, 128, 8, 16, 32, 64, 128, 256>(*config, function)
                   : lamina::with_gemm_config<false, 128, 8, 16, 32, 64, 128, 256>(*config, function)) == cudaSuccess;
}
int takes_fp8(const lamina::GemmConfig* config) {
  const auto function = [](auto, auto) -> int { return cudaSuccess; };
  return lamina::with_gemm_config<false, 64, 8, 16, 32, 64, 128>(*config, function) == cudaSuccess;
}
}
