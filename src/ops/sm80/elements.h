// Copies of rows of any width to shared memory. A chunk is eight elements of 2 bytes. Where the chunks of rows do not
// begin at multiples of 16 bytes, they are copied in pieces of 4 or 2 bytes.
#pragma once

#include "ops/sm80/copy.h"

namespace moebius::cuda::sm80 {

// Returns the most bytes, 16, 4 or 2, of which the address and the pitch of rows, in elements of 2 bytes,
// are multiples.
inline uint32_t copy_unit(const void* rows, int64_t pitch) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(pitch * 2);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

// Loads the first n of eight elements of 2 bytes, and zeros in place of the others. It is volatile assembly, so that
// all loads are on their way before the first use of one.
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

}  // namespace moebius::cuda::sm80
