// An operand of a product on its way to the tensor cores: from rows in global memory to a swizzled tile
// in a slot of shared memory, and from there to the registers of a warp.
#pragma once

#include "ops/sm80/copy.h"
#include "ops/sm80/mma.h"

namespace moebius::cuda::sm80 {

// Rows of bf16 in global memory.
struct Source {
  const char* rows;
  const int32_t* index;  // row i is read from rows index[i]; null: from row i
  uint32_t chunks;       // of 16 bytes in a row
};

// The row of the source that is row i; negative where not valid. Volatile: written as C++, the compiler
// moves conditional loads down to their use, one after the other, and each waits for the memory.
__device__ __forceinline__ int32_t row_in_source(const int32_t* index, int32_t i, bool valid) {
  int32_t row = valid && index == nullptr ? i : -1;
  asm volatile(
      "{\n .reg .pred indexed;\n"
      " setp.ne.u32 indexed, %2, 0;\n"
      " @indexed ld.global.nc.b32 %0, [%1];\n}\n"
      : "+r"(row)
      : "l"(index + i), "r"(static_cast<uint32_t>(valid && index != nullptr)));
  return row;
}

// Tiles whose rows run along k: kRows of them, kDepth elements deep. A thread copies one chunk of
// kCopies rows.
template <int kRows, int kDepth, int kThreads>
class RowsAlongK {
 public:
  static constexpr int kChunks = kDepth / 8, kRowsAtOnce = kThreads / kChunks, kCopies = kRows / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && kCopies * kRowsAtOnce == kRows);

  __device__ __forceinline__ RowsAlongK() : to_(swizzled<kChunks>(row(), chunk())) {}

  // row_of(i): the row of the source that is row i of the tile; negative: zeros.
  template <class RowOf>
  __device__ __forceinline__ void open(const char* rows, uint32_t chunks, RowOf row_of) {
    rows_ = rows;
    left_ = static_cast<int32_t>(chunks) - static_cast<int32_t>(chunk());
    there_ = 0;
    int32_t from[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) from[i] = row_of(static_cast<int32_t>(row()) + i * kRowsAtOnce);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      there_ |= (from[i] >= 0 ? 1u : 0u) << i;
      first_[i] = static_cast<uint32_t>(max(from[i], 0)) * chunks + chunk();
    }
  }

  // The next slot of k: slots are copied in order.
  __device__ __forceinline__ void copy(uint32_t slot) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_16(slot + to_ + i * kRowsAtOnce * kChunks * 16, rows_ + uint64_t{first_[i]} * 16,
              left_ > 0 && (there_ >> i & 1) != 0);
    }
    rows_ += kChunks * 16;
    left_ -= kChunks;
  }

 private:
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kChunks; }

  uint32_t to_, there_ = 0;
  int32_t left_ = 0;  // chunks from the next one on
  const char* rows_ = nullptr;
  uint32_t first_[kCopies] = {};
};

// Tiles whose rows run along m (or n): kDepth rows of kCols elements. A thread copies one chunk of each of
// kCopies rows.
template <int kCols, int kDepth, int kThreads, bool kIndexed>
class RowsAcrossK {
 public:
  static constexpr int kChunks = kCols / 8, kRowsAtOnce = kThreads / kChunks, kCopies = kDepth / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && kCopies * kRowsAtOnce == kDepth);

  __device__ __forceinline__ RowsAcrossK() : to_(swizzled<kChunks>(row(), chunk())) {}

  // Rows [k, end_k) of the source, from chunk `first` on.
  __device__ __forceinline__ void open(const char* rows, const int32_t* index, uint32_t chunks, uint32_t first,
                                       int32_t k, int32_t end_k) {
    rows_ = rows + uint64_t{first + chunk()} * 16;
    index_ = index;
    row_bytes_ = chunks * 16;
    inside_ = first + chunk() < chunks;
    k_ = k + static_cast<int32_t>(row());
    end_k_ = end_k;
    find();
  }

  __device__ __forceinline__ void copy(uint32_t slot) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t from = kIndexed ? next_[i] : k_ + i * kRowsAtOnce;
      const bool there = inside_ && (kIndexed ? from >= 0 : from < end_k_);
      copy_16(slot + to_ + i * kRowsAtOnce * kChunks * 16, rows_ + uint64_t{static_cast<uint32_t>(from)} * row_bytes_,
              there);
    }
    k_ += kDepth;
    find();
  }

 private:
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kChunks; }
  // The rows that the next copy reads, one slot before it does.
  __device__ __forceinline__ void find() {
    if constexpr (kIndexed) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int32_t k = k_ + i * kRowsAtOnce;
        next_[i] = row_in_source(index_, k, k < end_k_);
      }
    }
  }

  uint32_t to_, row_bytes_ = 0;
  bool inside_ = false;
  int32_t k_ = 0, end_k_ = 0;
  const char* rows_ = nullptr;
  const int32_t* index_ = nullptr;
  int32_t next_[kIndexed ? kCopies : 1] = {};
};

// The part of a tile that a warp multiplies: 64 of its rows (or columns), 16 of k at a time, as four
// fragments of 16 x 16. kLeft: of A, else of B, where a fragment is two of 16 x 8.
template <Major kMajor, bool kLeft, int kRowChunks>
class Fragments {
 public:
  // first: the warp's first row or column in the tile, a multiple of 64.
  __device__ __forceinline__ explicit Fragments(uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, low = lane / 8 % 2, high = lane / 16;
    // The matrices of A follow each other along m, then along k; those of B along k, then along n.
    const uint32_t along_k = kLeft ? high : low, across = kLeft ? low : high;
    at_ = kMajor == Major::k ? swizzled<kRowChunks>(first + lane % 8 + 8 * across, along_k)
                             : swizzled<kRowChunks>(lane % 8 + 8 * along_k, first / 8 + across);
  }

  // All 64, at depth 16 kStep of the slot.
  template <int kStep>
  __device__ __forceinline__ void load(uint32_t (&to)[4][4], uint32_t slot) const {
    constexpr uint32_t kRowBytes = kRowChunks * 16;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      // Two chunks further is an exclusive or of the address: the tile begins at a multiple of 128 bytes.
      const uint32_t at =
          kMajor == Major::k ? (at_ ^ kStep * 32) + i * 16 * kRowBytes : (at_ ^ i * 32) + kStep * 16 * kRowBytes;
      load_matrices<kMajor == Major::mn>(to[i], slot + at);
    }
  }

 private:
  uint32_t at_;
};

}  // namespace moebius::cuda::sm80
