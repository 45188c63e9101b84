// The ring of shared-memory slots between the producers and the consumers of a kernel for sm_90a,
// as 32-bit shared addresses. Slot i is full when its bytes have landed, and empty when the
// consumers of both blocks of the cluster have read it: each block also loads into the other.
#pragma once

#include "ops/sm90/sm90.h"

namespace moebius::cuda::sm90 {

// Returns the value of lane 0. The compiler then knows that the value is uniform in the warp, and
// keeps it instead of computing it from the special registers in each step of a loop.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

template <int kNum, uint32_t kBytes>
struct Slots {
  uint32_t first, barriers;
  __device__ __forceinline__ uint32_t slot(uint32_t i) const { return first + i * kBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return barriers + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return barriers + 8 * kNum + 8 * i; }

  // Called by one thread, before a cluster_sync.
  __device__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
    for (uint32_t i = 0; i < kNum; ++i) {
      mbarrier_init(full(i), full_arrivals);
      mbarrier_init(empty(i), empty_arrivals);
    }
    fence_mbarrier_init();
  }
  // Called by a whole, converged consumer warp: from its side, both blocks may fill the slot again.
  __device__ __forceinline__ void release(uint32_t i) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) mbarrier_arrive_cluster(empty(i), lane);
  }
};

// A wgmma operand that starts in slot 0; only the low word of its descriptor depends
// on the address.
template <Major kMajor>
struct SlotOperand {
  uint32_t low, high;
  __device__ __forceinline__ SlotOperand(uint32_t address, uint32_t block_bytes) {
    const uint64_t operand = wgmma_operand<kMajor>(address, block_bytes);
    low = static_cast<uint32_t>(operand);
    high = static_cast<uint32_t>(operand >> 32);
  }
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    uint64_t operand;
    asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"(low + (bytes >> 4)), "r"(high));
    return operand;
  }
};

// Returns base + chunks * 16, computed here and not where it is used: the address of a copy must be ready when
// its slot is.
__device__ __forceinline__ const char* chunk_address(const char* base, uint32_t chunks) {
  const char* address;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(chunks), "l"(base));
  return address;
}

}  // namespace moebius::cuda::sm90
