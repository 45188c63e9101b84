// Kernels that start before the previous kernel has ended (programmatic dependent launch). A pass of a few tokens is a
// chain of kernels of microseconds, much of which is their launch. Only Hopper GPUs do this, since the code for other
// GPUs is compiled for compute capability 8.0. cmake/cuda.cmake compiles sources that include this file for both.
// Such a kernel calls let_next_start(), reads nothing but weights, and calls wait_for_inputs() before it reads anything
// else, and before it writes. Every kernel does both on all paths, so all earlier kernels have then ended.
// REQUIRES of the caller: kernels that write these weights ended before the previous kernel began.
// An op that cannot require this only prefetches weights. A prefetch gives no values, and L2 has what is written later.
// A kernel may also read, with __ldcg, where the rows are that it prefetches. Such values may be old, so they decide
// only what is prefetched, and are read again after the wait. __ldcg leaves no old line in L1 for that read to find.
#pragma once

#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"

namespace moebius::cuda {

constexpr int64_t kEarlyRows = 32;  // kernels of more rows than these gain nothing

// Without code of its own, a Hopper GPU would start these kernels early, and they would not wait.
template <int... kArchitectures>
constexpr bool kHopperIsAmong = ((kArchitectures == 900) || ...);
static_assert(
    kHopperIsAmong<__CUDA_ARCH_LIST__>,
    "kernels that start early need code for Hopper; include early_launch.h in the .cu file, and run cmake again");

// From here on the next kernel of the stream may start.
__device__ __forceinline__ void let_next_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the earlier kernels have ended; their results can then be read.
__device__ __forceinline__ void wait_for_inputs() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches the 128 bytes at this address into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

struct LaunchShape {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
};

// Launches kernel(args...), early if the GPU is a Hopper and `early` holds.
// REQUIRES: with `early`, the kernel follows the rules at the top of this file.
template <class... P>
void launch_kernel(const Stream& s, bool early, const LaunchShape& how, void (*kernel)(P...), P... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = how.blocks;
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = cuda_stream(s);
  config.attrs = &attribute;
  config.numAttrs = early && gpu_limits(s).is_hopper() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "cudaLaunchKernelEx");
}

}  // namespace moebius::cuda
