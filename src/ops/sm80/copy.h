// Asynchronous copies from global to shared memory (PTX ISA, cp.async), and the addresses of 16-byte chunks
// in shared memory. A chunk is eight elements of 2 bytes. Rows of any width are copied too: where their chunks do not
// begin at multiples of 16 bytes, in pieces of 4 or 2 bytes.
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
// Returns the most bytes, 16, 4 or 2, of which the address and the pitch of rows, in elements of 2 bytes, are multiples.
inline uint32_t copy_unit(const void* rows, int64_t pitch) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(pitch * 2);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}
// Stores 16 bytes from registers.
__device__ __forceinline__ void store_16(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}
// Loads the first n of eight elements of 2 bytes, and zeros in place of the others. It is volatile assembly, so that all
// loads are on their way before the first use of one.
__device__ __forceinline__ void load_elements(uint32_t (&words)[4], const void* from, int32_t n) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    asm volatile(
        "{\n .reg .pred low, high;\n .reg .b16 x, y;\n"
        " setp.gt.s32 low, %2, 0;\n setp.gt.s32 high, %2, 1;\n"
        " mov.b16 x, 0;\n mov.b16 y, 0;\n"
        " @low ld.global.b16 x, [%1];\n @high ld.global.b16 y, [%1 + 2];\n"
        " mov.b32 %0, {x, y};\n}\n"
        : "=r"(words[j])
        : "l"(static_cast<const char*>(from) + 4 * j), "r"(n - 2 * j)
        : "memory");
  }
}
// Copies the first n of eight elements, and writes zeros in place of the others. unit: 16, 4 or 2; `from` is a multiple
// of it. With 16, all eight are copied if n is positive. With 4, n is even. With 2, the copies have ended when the call
// returns; the others are asynchronous.
__device__ __forceinline__ void copy_elements(uint32_t to, const char* from, int32_t n, uint32_t unit) {
  if (unit == 16) {
    copy_16(to, from, n > 0);
  } else if (unit == 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) copy_4(to + 4 * j, from + 4 * j, 2 * j < n);
  } else {
    uint32_t words[4];
    load_elements(words, from, n);
    store_16(to, words);
  }
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
