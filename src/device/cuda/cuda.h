// CUDA calls and access to a stream, for the CUDA files of any folder.
// Only files of the CUDA build include it.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"
#include "device/accelerator.h"
#include "device/device.h"

// Throws Error{internal} with the call and CUDA's message; OutOfMemory when memory ran out.
#define MOEBIUS_CUDA(call) ::moebius::check_cuda((call), #call)

namespace moebius {

void check_cuda(cudaError_t status, const char* call);

// Called after each kernel launch.
inline void check_launch(const char* op) { check_cuda(cudaPeekAtLastError(), op); }

inline cudaStream_t cuda_stream(const Stream& s) { return static_cast<cudaStream_t>(s.accelerator().native_stream()); }

// Returns whether a CudaGraph is being captured: work is recorded, not run.
inline bool is_capturing(const Stream& s) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(cuda_stream(s), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Data that an op keeps between calls on the stream's GPU. It is default-constructed at first use.
template <class T>
T& op_state(const Stream& s) {
  return s.accelerator().template state<T>();
}

}  // namespace moebius
