// The CUDA errors that mean that the system pinned no host memory.
#pragma once

#include <cuda_runtime.h>

namespace moebius {

// Returns whether the host has too little memory to pin, or does not let this process pin it.
inline bool is_refused_pinning(cudaError_t status) {
  return status == cudaErrorMemoryAllocation || status == cudaErrorNotPermitted || status == cudaErrorNotSupported ||
         status == cudaErrorOperatingSystem;
}

}  // namespace moebius
