// wgmma of sm_90a on FP8: a warpgroup multiplies 64 x 32 by 32 x N tiles in shared memory into f32
// registers. A is E4M3 or E5M2, and B is E4M3. Both are K-major: the instruction has no other form for
// 8 bits.
//
// Tiles have the 128-byte swizzle, as TMA writes them with a box of 128 elements across. 32 further
// along K: + 32 bytes. The registers hold the tile as those of Wgmma do (sm90/wgmma.h).
#pragma once

#include <cstdint>

namespace moebius::cuda {

//   d = a b + (accumulate ? d : 0)
//
// The tensor cores keep fewer bits of a sum than f32 has, so a chain
// is short: 128 of K (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
//
// An instruction's name is a literal, so a macro writes it for both kinds of elements.
#define MOEBIUS_WGMMA_F8(elements_of_a)                                                                             \
  asm volatile(                                                                                                     \
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"                                                                \
      " wgmma.mma_async.sync.aligned.m64n128k32.f32." elements_of_a                                                 \
      ".e4m3 {"                                                                                                     \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "             \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "   \
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, "   \
      "%63"                                                                                                         \
      "}, %64, %65, p, 1, 1;\n}\n"                                                                                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),      \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),     \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),     \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),     \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),     \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),     \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                   \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))                                                           \
      : "memory")

struct WgmmaE4m3 {
  __device__ __forceinline__ static void multiply(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    MOEBIUS_WGMMA_F8("e4m3");
  }
};

// The same with A in E5M2.
struct WgmmaE5m2 {
  __device__ __forceinline__ static void multiply(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    MOEBIUS_WGMMA_F8("e5m2");
  }
};

#undef MOEBIUS_WGMMA_F8

}  // namespace moebius::cuda
