// A CUDA runtime of two devices that launches nothing: it keeps limits of shared memory and notes what it is asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#define __CUDA_ARCH_LIST__ 900
#define __device__
#define __forceinline__ inline

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorStreamCaptureImplicit = 906 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
using cudaStream_t = void*;
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline const dim3 gridDim;  // which kernels ask, and none runs
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace fake {
constexpr int kMost = 227 << 10, kStatic = 1 << 10;
inline int device, num_settings, num_launches, num_pdl, num_cluster;
inline cudaError_t last, of_capture;
inline cudaStreamCaptureStatus capture;
inline std::map<std::pair<int, const void*>, size_t> limits;
inline cudaError_t fail(cudaError_t error) { return last = error; }
}  // namespace fake

inline cudaError_t cudaGetDevice(int* device) { return *device = fake::device, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return std::exchange(fake::last, cudaSuccess); }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = fake::kMost, cudaSuccess; }
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return attributes->sharedSizeBytes = fake::kStatic, cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  ++fake::num_settings;
  if (bytes + fake::kStatic > fake::kMost) return fake::fail(cudaErrorInvalidValue);
  fake::limits[{fake::device, kernel}] = static_cast<size_t>(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = fake::capture;
  return fake::of_capture == cudaSuccess ? cudaSuccess : fake::fail(fake::of_capture);
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments...) {
  const size_t limit = fake::limits[{fake::device, reinterpret_cast<const void*>(kernel)}];
  if (config->dynamicSmemBytes > (limit > 0 ? limit : 48 << 10)) return fake::fail(cudaErrorInvalidValue);
  ++fake::num_launches, fake::num_pdl = 0, fake::num_cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      fake::num_cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
    else
      fake::num_pdl = config->attrs[i].val.programmaticStreamSerializationAllowed;
  }
  return cudaSuccess;
}
