// TMA tensor maps (CUtensorMap): how TMA loads find boxes of a tensor.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "byte_formats.cuh"

namespace lamina {

using Encode = decltype(&cuTensorMapEncodeTiled);

// cuTensorMapEncodeTiled of the driver, which no library needs to be linked for; null where the driver has none.
inline Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

inline CUtensorMapDataType tensor_map_type(__nv_bfloat16) { return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; }
inline CUtensorMapDataType tensor_map_type(__half) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }
inline CUtensorMapDataType tensor_map_type(Float8) { return CU_TENSOR_MAP_DATA_TYPE_UINT8; }
inline CUtensorMapDataType tensor_map_type(Int8) { return CU_TENSOR_MAP_DATA_TYPE_UINT8; }

// A tensor as TMA takes it: the contiguous dimension first, all in elements; and boxes of it.
template <int kDimensions>
struct Boxes {
  int64_t sizes[kDimensions];
  int64_t strides[kDimensions - 1];  // of the dimensions that follow
  int64_t box[kDimensions];
};

// Fills the map, in the 128-byte swizzle that WGMMA reads or in another; elements out of bounds are read as zeros.
// cudaErrorNotSupported where the driver has no such function.
template <typename T, int kDimensions>
inline cudaError_t encode_tensor_map(CUtensorMap* map, const void* data, const Boxes<kDimensions>& boxes,
                                     CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t sizes[kDimensions], strides[kDimensions - 1];
  cuuint32_t box[kDimensions], steps[kDimensions];
  for (int i = 0; i < kDimensions; ++i) {
    sizes[i] = static_cast<cuuint64_t>(boxes.sizes[i]);
    box[i] = static_cast<cuuint32_t>(boxes.box[i]), steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(boxes.strides[i - 1]) * sizeof(T);
  }
  const CUresult result = encode(map, tensor_map_type(T{}), kDimensions, const_cast<void*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace lamina
