// What CUDA files of any room share. Only files of the CUDA build include it.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"
#include "device/accelerator.h"
#include "device/device.h"

// Error{internal} with the call and CUDA's own words.
#define MOEBIUS_CUDA(call) ::moebius::check_cuda((call), #call)

namespace moebius {

void check_cuda(cudaError_t status, const char* call);

// After each launch.
inline void check_launch(const char* op) { check_cuda(cudaPeekAtLastError(), op); }

inline cudaStream_t cuda_stream(const Stream& s) { return static_cast<cudaStream_t>(s.accelerator().native_stream()); }

// Between CudaGraph's begin and end: work is noted, not run.
inline bool is_capturing(const Stream& s) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(cuda_stream(s), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// What an op keeps between calls on the stream's GPU: default-constructed at first use.
template <class T>
T& op_state(const Stream& s) {
  return s.accelerator().template state<T>();
}

}  // namespace moebius
