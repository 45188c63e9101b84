#include "device/gpu_limits.h"

#include "device/cuda/cuda.h"

namespace moebius {

GpuLimits query_gpu_limits() {
  int device = 0;
  MOEBIUS_CUDA(cudaGetDevice(&device));
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    MOEBIUS_CUDA(cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  return {.capability_major = attribute(cudaDevAttrComputeCapabilityMajor),
          .capability_minor = attribute(cudaDevAttrComputeCapabilityMinor),
          .num_multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
          .shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .shared_bytes_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
}

}  // namespace moebius
