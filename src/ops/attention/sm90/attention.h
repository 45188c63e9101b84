// The parts that the attention kernels for sm_90a share. All walk tiles of bf16 rows that the copy
// engine brings to shared memory while two or three warpgroups multiply and one warp of another requests
// the next tiles; every score matrix is in registers.
//
// doc_start does not decrease within a sequence, so the queries of a tile attend to one range of key
// tiles, and the keys of a tile are attended to by one range of query tiles.
#pragma once

#include <cuda_bf16.h>

#include "ops/attention/cuda/attention_mask.h"
#include "ops/sm90/sm90.h"
#include "ops/sm90/tensor_map.h"
#include "ops/sm90/wgmma_registers.h"

namespace moebius::cuda {

constexpr int kGroupThreads = 128, kSm90Threads = 3 * kGroupThreads;  // threads of a warpgroup, and of a block
constexpr uint32_t kProducerRegisters = 24, kConsumerRegisters = 240, kConsumerWarps = 8;

// tma_load() of ops/sm90/copy.h for a map of four dimensions.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t y,
                                         int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// A tile of rows x kWidth bf16 in shared memory: blocks of 64 columns, each rows x 128 bytes with
// the 128-byte swizzle. The last block has zeros where the width ends.
template <int kRows, int kWidth>
struct Sm90Tile {
  static constexpr int kBlocks = (kWidth + 63) / 64, kBlockBytes = kRows * 128, kBytes = kBlockBytes * kBlocks;

  // Called by one thread; the map is that of rows_map.
  __device__ static void load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int head, int64_t row, int64_t b) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t at = to + block * kBlockBytes;
      if constexpr (kWidth % 64 == 0)
        tma_load(at, map, barrier, head * kWidth + block * 64, static_cast<int>(row), static_cast<int>(b));
      else
        tma_load(at, map, barrier, block * 64, head, static_cast<int>(row), static_cast<int>(b));
    }
  }
  // Operand of a product over the width: rows from `row`, columns 16 step to 16 step + 15.
  __device__ __forceinline__ static uint64_t across(uint32_t tile, int row, int step) {
    return wgmma_operand<Major::k>(tile + step / 4 * kBlockBytes + row * 128 + step % 4 * 32);
  }
  // Operand of a product over the rows: rows 16 step to 16 step + 15, all columns.
  __device__ __forceinline__ static uint64_t along(uint32_t tile, int step) {
    return wgmma_operand<Major::mn>(tile + step * 2048, kBlockBytes);
  }
};

// x [batch, rows, heads, width] as boxes of kRows rows x 64 columns; zeros past the rows
// of a sequence, and past a width that is not a multiple of 64.
inline CUtensorMap rows_map(const Tensor& x, int64_t batch, uint32_t box_rows) {
  const int64_t rows = x.dim(0) / batch, heads = x.dim(1), width = x.dim(2), columns = heads * width;
  if (width % 64 != 0) {
    return make_tensor_map<4>(
        x.data, {{{width, 1, 64}, {heads, width, 1}, {rows, columns, box_rows}, {batch, columns * rows, 1}}});
  }
  return make_tensor_map<3>(x.data, {{{columns, 1, 64}, {rows, columns, box_rows}, {batch, columns * rows, 1}}});
}

// An operand at a shared-memory address, from which the compiler computes those of other addresses where they are
// needed. It would otherwise keep all of them in registers, and has too few.
template <Major kMajor>
class Operand {
 public:
  __device__ __forceinline__ explicit Operand(uint32_t address, uint32_t block_bytes = 8192) {
    const uint64_t first = wgmma_operand<kMajor>(address, block_bytes);
    low_ = static_cast<uint32_t>(first), high_ = static_cast<uint32_t>(first >> 32);
    asm volatile("" : "+r"(low_));
  }
  __device__ __forceinline__ uint64_t at(int bytes) const { return uint64_t{high_} << 32 | (low_ + (bytes >> 4)); }

 private:
  uint32_t low_, high_;
};

// Bytes from the first columns of a tile to columns 16 step on.
template <class X>
__device__ __forceinline__ constexpr int bytes_across(int step) {
  return step / 4 * X::kBlockBytes + step % 4 * 32;
}

// sums [64, 32, 64 or 128] = x rows [row, row + 64) times y rows, over the width: 16 at a time.
template <class X, class Y, int kWidth, int kNum>
__device__ __forceinline__ void multiply_rows(float (&sums)[kNum], uint32_t x, int row, uint32_t y) {
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    Wgmma<Major::k, Major::k>::multiply(sums, X::across(x, row, step), Y::across(y, 0, step), step > 0);
  }
  wgmma_commit();
}

// The first 16 kSteps columns of rows [row, row + 64) of a tile as left operand in registers.
template <class X, int kSteps, int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], uint32_t x, int row) {
  const int lane = threadIdx.x % 32, my_row = row + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t* to = words + 4 * step;
    ldmatrix_4(x + step / 4 * X::kBlockBytes + swizzle_128(my_row, step % 4 * 2 + lane / 16), to[0], to[1], to[2],
               to[3]);
  }
}

// sums [64, .] = x rows [row, row + 64) times y rows, over the width, of which `words` holds the first
// 16 kHeld columns of x.
template <class X, class Y, int kWidth, int kHeld, int kNum, int kWords>
__device__ __forceinline__ void multiply_held(float (&sums)[kNum], const uint32_t (&words)[kWords], uint32_t x, int row,
                                              uint32_t y) {
#pragma unroll
  for (int step = 0; step < kHeld; ++step) {
    wgmma_registers<Major::k>(sums, words + 4 * step, Y::across(y, 0, step), step > 0);
  }
#pragma unroll
  for (int step = kHeld; step < kWidth / 16; ++step) {
    Wgmma<Major::k, Major::k>::multiply(sums, X::across(x, row, step), Y::across(y, 0, step), step > 0);
  }
  wgmma_commit();
}

// sums [64, 64] = x in registers times y rows, over the width.
template <class Y, int kWidth, int kNum>
__device__ __forceinline__ void multiply_words(float (&sums)[kNum], const uint32_t (&x)[kWidth / 4], uint32_t y) {
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    wgmma_registers<Major::k>(sums, x + 4 * step, Y::across(y, 0, step), step > 0);
  }
  wgmma_commit();
}

// The accumulators kFrom to kFrom + kTo - 1: those of columns 2 kFrom to 2 (kFrom + kTo) - 1.
template <int kFrom, int kTo, int kNum>
__device__ __forceinline__ float (&columns_of(float (&sums)[kNum]))[kTo] {
  static_assert(kFrom + kTo <= kNum);
  return *reinterpret_cast<float(*)[kTo]>(sums + kFrom);
}
template <int kFrom, int kTo, int kNum>
__device__ __forceinline__ const float (&columns_of(const float (&sums)[kNum]))[kTo] {
  static_assert(kFrom + kTo <= kNum);
  return *reinterpret_cast<const float(*)[kTo]>(sums + kFrom);
}

// sums += weights [64, 16 kSteps] in registers times y [16 kSteps, width]
template <class Y, int kSteps, int kNum>
__device__ __forceinline__ void add_product(float (&sums)[kNum], const uint32_t (&weights)[4 * kSteps], uint32_t y) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t* const words = weights + 4 * step;
    if constexpr (kNum == 48) {  // 96 columns: a block of 64, and half of the next
      wgmma_registers<Major::mn>(columns_of<0, 32>(sums), words, Y::along(y, step), true);
      wgmma_registers<Major::mn>(columns_of<32, 16>(sums), words, Y::along(y + Y::kBlockBytes, step), true);
    } else {
      wgmma_registers<Major::mn>(sums, words, Y::along(y, step), true);
    }
  }
  wgmma_commit();
}

// Accumulators as left operand, rounded to bf16.
template <int kNum>
__device__ __forceinline__ void pack(uint32_t (&words)[kNum / 2], const float (&x)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum / 2; ++i) words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
}

template <int kNum>
__device__ __forceinline__ void hold_words(uint32_t (&words)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// The place of a thread's accumulators in the 64 rows of its warpgroup:
// element 4 j + 2 i + c is (row + 8 i, 8 j + col + c).
struct Fragment {
  int row, col;
};
__device__ __forceinline__ Fragment fragment() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  return {16 * warp + lane / 4, 2 * (lane % 4)};
}

// Stores 64 rows of accumulators times factor[i] to rows from `row` below `end` of head h of x [.,
// heads, width].
template <int kWidth>
__device__ __forceinline__ void store_sums(__nv_bfloat16* x, const float (&sums)[kWidth / 2], const float (&factor)[2],
                                           int64_t row, int64_t end, int heads, int h) {
  const Fragment at = fragment();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = row + at.row + 8 * i;
    if (r >= end) continue;
    auto* to = reinterpret_cast<uint32_t*>(x + (r * heads + h) * kWidth + at.col);
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      to[4 * j] = pack_bf16(sums[4 * j + 2 * i] * factor[i], sums[4 * j + 2 * i + 1] * factor[i]);
    }
  }
}

// The same for rows that attend to no key.
template <int kWidth>
__device__ __forceinline__ void store_zeros(__nv_bfloat16* x, int64_t row, int64_t end, int heads, int h) {
  const float zeros[kWidth / 2] = {}, factor[2] = {};
  store_sums<kWidth>(x, zeros, factor, row, end, heads, h);
}

}  // namespace moebius::cuda
