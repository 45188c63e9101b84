// Asynchronous copies from global to shared memory (PTX ISA, cp.async), and the addresses of 16-byte chunks
// in shared memory.
#pragma once

#include <cstdint>

namespace moebius::cuda::sm80 {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes. If not valid, it writes zeros and reads nothing.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
// Does the same with 4 bytes.
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
// Stores 16 bytes from registers.
__device__ __forceinline__ void store_16(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}
// Makes the copies since the last call a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Returns the byte offset of a chunk in a tile whose rows have kChunks chunks. Eight rows of one chunk are in
// different banks, and so are the chunks of a row.
template <int kChunks>
__device__ __forceinline__ constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(kChunks % 4 == 0);
  const uint32_t by = kChunks % 8 == 4 ? row / 2 % 4 : row % 8;
  return (row * kChunks + (chunk ^ by)) * 16;
}

}  // namespace moebius::cuda::sm80
