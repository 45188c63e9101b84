// Tensor maps of the bulk tensor copy engine, encoded on the host. A map describes memory and a box; it
// is passed to a kernel as a `const __grid_constant__ CUtensorMap` parameter.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "core/error.h"

namespace moebius::cuda {

struct BoxDim {
  int64_t size;     // elements of the tensor in this dimension
  int64_t stride;   // in elements, of one step along this dim; 1 for the innermost
  uint32_t extent;  // elements of the box in this dimension
};

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Returns the driver's encoder, found through the runtime: nothing links libcuda.
inline EncodeTensorMap tensor_map_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  MOEBIUS_CHECK(internal, error == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr,
                "cuTensorMapEncodeTiled: not in this driver ({})", cudaGetErrorString(error));
  return reinterpret_cast<EncodeTensorMap>(found);
}

struct MapOptions {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int element_bytes = 2;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;  // the innermost extent is then at most 128 bytes
};

// dims innermost first. REQUIRES: data at a multiple of 16 bytes, strides of the outer dims too.
// Elements of a box outside the tensor are loaded as zeros and not stored.
template <size_t kRank>
CUtensorMap make_tensor_map(const void* data, const std::array<BoxDim, kRank>& dims, const MapOptions& o = {}) {
  const EncodeTensorMap encode = tensor_map_encoder();
  std::array<cuuint64_t, kRank> sizes{}, strides{};
  std::array<cuuint32_t, kRank> extents{}, steps{};
  for (size_t i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(dims[i].size);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(dims[i].stride * o.element_bytes);
    extents[i] = dims[i].extent;
    steps[i] = 1;
  }
  CUtensorMap map;
  const CUresult result = encode(&map, o.type, kRank, const_cast<void*>(data), sizes.data(), strides.data(),
                                 extents.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, o.swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MOEBIUS_CHECK(internal, result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error {} for rank {}, innermost dim {}",
                static_cast<int>(result), kRank, dims[0].size);
  return map;
}

}  // namespace moebius::cuda
