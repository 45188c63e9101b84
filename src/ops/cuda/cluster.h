// Blocks of a cluster, which read each other's shared memory. Kernels that use them are compiled for all GPUs, like
// those of ops/cuda/early_launch.h, and start as early, but only a Hopper may launch them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "ops/cuda/early_launch.h"

namespace moebius::cuda {

// All threads of the cluster wait for each other; then each sees what the others wrote before.
__device__ __forceinline__ void cluster_sync() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
#else
  __trap();
#endif
}

// Returns the value that block `rank` of the cluster has at the place that `own` is in this block's shared memory.
template <class T>
__device__ __forceinline__ T load_of_block(const T* own, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  T x = {};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(remote) : "memory");
    memcpy(&x, &bits, sizeof x);
  } else {
    uint64_t bits;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(bits) : "r"(remote) : "memory");
    memcpy(&x, &bits, sizeof x);
  }
#endif
  return x;
}

// Launches kernel(args...) as launch_kernel does, with clusters of `cluster_blocks` neighbours in x. REQUIRES:
// a Hopper.
template <class... P>
void launch_clusters(const Stream& s, bool early, const LaunchShape& how, unsigned cluster_blocks, void (*kernel)(P...),
                     P... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster_blocks;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = how.blocks;
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = cuda_stream(s);
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "cudaLaunchKernelEx");
}

}  // namespace moebius::cuda
