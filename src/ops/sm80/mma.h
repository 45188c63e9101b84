// The tensor cores of compute capability 8.0 and later: a warp multiplies 16 x 16 by 16 x 8 tiles of
// bf16 in registers, and adds to f32 (PTX ISA, mma.m16n8k16 and ldmatrix).
//
// Lane l of the warp has of a tile of sums d[2 i + c]: row 8 i + l / 4, column 2 (l % 4) + c.
#pragma once

#include <cstdint>

namespace moebius::cuda::sm80 {

// The order of an operand in memory: its rows run along k, or along m (n for the right operand).
enum class Major : int { k, mn };

// Loads four matrices of 8 x 8 elements of 2 bytes from shared memory. Lane l gives the address of row l % 8 of matrix
// l / 8, and gets elements 2 (l % 4) and the next of row l / 4 of each, or of each one's transpose with kTransposed.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
}

// d += a b for a 16 x 16 tile of A and a 16 x 8 tile of B.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace moebius::cuda::sm80
