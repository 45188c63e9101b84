// PTX of sm_90a for synchronization: mbarriers, named barriers, proxy fences, clusters, register
// budgets. Shared-memory addresses are 32-bit addresses of the shared window (smem_addr), so that
// address arithmetic is possible.
#pragma once

#include <cstdint>

namespace moebius::cuda {

__device__ __forceinline__ uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Returns true in one lane of the warp; all lanes must call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n .reg .pred p;\n"
      " elect.sync _|p, 0xffffffff;\n"
      " selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(chosen));
  return chosen != 0;
}

// An mbarrier's phase completes when `arrivals` threads have arrived and all expected bytes have
// landed. Waiting for parity p returns once the phase of parity p has completed: a fresh barrier is
// in phase 0, so a wait for parity 1 returns at once and a wait for parity 0 blocks.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster; one thread, before the
// first sync.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once and adds to the bytes that the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of another block of the cluster (or of this one). Says that this
// warp's wgmmas have read a slot; it publishes no ordinary writes to the other block: release at
// cluster scope costs a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t block_in_cluster) {
  asm volatile(
      "{\n .reg .b32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(block_in_cluster)
      : "memory");
}

// Arrives for this thread once all its earlier cp.async have landed; the arrival is one
// that init counted.
__device__ __forceinline__ void mbarrier_arrive_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

// Named barriers 1 to 15 (0 is __syncthreads): `threads` is a multiple of 32 and counts
// arrivers and waiters.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders ordinary accesses to shared memory of this thread (and what it has synchronised with)
// before later accesses of the async proxy: the copy engine and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ uint32_t cluster_block_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// A walk over the stages of a ring in shared memory: which is next, and the parity of
// its barriers' phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ int last() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// These set the register budget of the calling warpgroup, a multiple of 8 in [24, 256]. The kernel needs
// __launch_bounds__(n, 1).
template <uint32_t kNum>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kNum));
}
template <uint32_t kNum>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kNum));
}

}  // namespace moebius::cuda
