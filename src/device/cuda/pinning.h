// The CUDA errors that mean that host memory could not be pinned.
#pragma once

#include <cuda_runtime.h>

namespace moebius {

// Returns whether the host has too little memory to pin, or this process may not pin it.
inline bool is_refused_pinning(cudaError_t status) {
  return status == cudaErrorMemoryAllocation || status == cudaErrorNotPermitted || status == cudaErrorNotSupported ||
         status == cudaErrorOperatingSystem;
}

}  // namespace moebius
