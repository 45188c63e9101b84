// The path of an operand to the tensor cores: from rows in global memory to a swizzled tile in a slot of shared memory,
// and from there to the registers of a warp.
#pragma once

#include "ops/sm80/elements.h"
#include "ops/sm80/mma.h"

namespace moebius::cuda::sm80 {

// How rows of bf16 are copied. A chunk is eight elements; the last one of a row may have fewer.
struct RowWidth {
  uint32_t elements, chunks;
  uint32_t unit;   // bytes of a copy: 16 where all chunks begin at multiples of 16 bytes; else 4 or 2
  uint32_t pitch;  // from a row to the next: in chunks if unit is 16, else in elements
};

// Rows of bf16 in global memory.
struct Source {
  const char* rows;
  const int32_t* index;  // row i is read from rows index[i]; null: from row i
  RowWidth width;
};

// Returns the row of the source from which row i is read, or a negative number if not valid. It is volatile assembly.
// With C++, the compiler would move conditional loads to their uses, one after the other, so that each would wait for
// the memory.
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

// The copies of a slot are made in parts, between products: part kPart of kParts has those in [kBegin, kEnd).
template <int kCopies, int kPart, int kParts>
struct CopyRange {
  static constexpr int kBegin = kCopies * kPart / kParts, kEnd = kCopies * (kPart + 1) / kParts;
};

// The rows of the source that a thread copies, where a tile has any: they are found once and kept.
template <int kCopies, int kRowsAtOnce>
class KeptRows {
 public:
  // row_of(i): the row of the source that is row i of the tile.
  template <class RowOf>
  __device__ __forceinline__ KeptRows(int32_t first, RowOf row_of) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) rows_[i] = row_of(first + i * kRowsAtOnce);
  }
  KeptRows() = default;
  __device__ __forceinline__ int32_t row(int i) const { return rows_[i]; }
  // The same where i is not a constant.
  __device__ __forceinline__ int32_t row_at(int i) const {
    int32_t row = rows_[0];
#pragma unroll
    for (int j = 1; j < kCopies; ++j) row = i == j ? rows_[j] : row;
    return row;
  }

 private:
  int32_t rows_[kCopies] = {};
};

// The same for tiles of consecutive rows, which need fewer registers: from `first` on, but none past `last`.
template <int kCopies, int kRowsAtOnce>
class NeighbouringRows {
 public:
  __device__ __forceinline__ NeighbouringRows(int32_t first, int32_t last) : first_(first), last_(last) {}
  NeighbouringRows() = default;
  __device__ __forceinline__ int32_t row(int i) const { return min(first_ + i * kRowsAtOnce, last_); }
  __device__ __forceinline__ int32_t row_at(int i) const { return row(i); }

 private:
  int32_t first_ = 0, last_ = 0;
};

// Tiles whose rows run along k: kRows of them, kDepth elements deep. A thread copies one chunk of kCopies rows,
// those that SourceRows names. If the tile has fewer rows, the others can be any rows, since their elements of the
// product are not stored.
template <int kRows, int kDepth, int kThreads, template <int, int> class SourceRowsOf>
class RowsAlongK {
 public:
  static constexpr int kChunks = kDepth / 8, kRowsAtOnce = kThreads / kChunks, kCopies = kRows / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && kCopies * kRowsAtOnce == kRows);
  using SourceRows = SourceRowsOf<kCopies, kRowsAtOnce>;

  __device__ __forceinline__ RowsAlongK() : to_(swizzled<kChunks>(first_row(), chunk())) {}

  // Returns the first row of the tile that this thread copies.
  static __device__ __forceinline__ uint32_t first_row() { return threadIdx.x / kChunks; }

  __device__ __forceinline__ void open(const char* rows, const RowWidth& width, const SourceRows& source_rows) {
    rows_ = rows + chunk() * 16;
    pitch_ = width.pitch;
    left_ = static_cast<int32_t>(width.chunks) - static_cast<int32_t>(chunk());
    source_rows_ = source_rows;
  }

  // Copies a part of the next slot of k: slots are copied in order, with next() between them. REQUIRES: the unit is 16.
  template <int kPart, int kParts>
  __device__ __forceinline__ void copy(uint32_t slot) const {
    using Range = CopyRange<kCopies, kPart, kParts>;
#pragma unroll
    for (int i = Range::kBegin; i < Range::kEnd; ++i) {
      const uint32_t from = static_cast<uint32_t>(source_rows_.row(i)) * pitch_;
      copy_16(slot + to_ + i * kRowsAtOnce * kChunks * 16, rows_ + uint64_t{from} * 16, left_ > 0);
    }
  }
  // Copies all of the next slot, of rows with any unit.
  __device__ __forceinline__ void copy_all(uint32_t slot, uint32_t unit) const {
    const int32_t in_last = unit == 16 ? 8 : static_cast<int32_t>((pitch_ - 1) % 8 + 1);
    const int32_t n = left_ > 1 ? 8 : left_ == 1 ? in_last : 0;
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const uint64_t from = uint64_t{static_cast<uint32_t>(source_rows_.row_at(i))} * pitch_;
      copy_elements(slot + to_ + i * kRowsAtOnce * kChunks * 16, rows_ + from * (unit == 16 ? 16 : 2), n, unit);
    }
  }
  __device__ __forceinline__ void next() {
    rows_ += kChunks * 16;
    left_ -= kChunks;
  }

 private:
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kChunks; }

  uint32_t to_, pitch_ = 0;
  int32_t left_ = 0;  // chunks from the next one on
  const char* rows_ = nullptr;
  SourceRows source_rows_{};
};

// Tiles whose rows run along m (or n): kDepth rows of kCols elements. A thread copies one chunk of each of
// kCopies rows.
template <int kCols, int kDepth, int kThreads, bool kIndexed>
class RowsAcrossK {
 public:
  static constexpr int kChunks = kCols / 8, kRowsAtOnce = kThreads / kChunks, kCopies = kDepth / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && kCopies * kRowsAtOnce == kDepth);

  __device__ __forceinline__ RowsAcrossK() : to_(swizzled<kChunks>(row(), chunk())) {}

  // Begins at rows [k, end_k) of the source, from chunk `first` on. Past the last chunk of a row the last one is read:
  // it only gives elements of the product that are not stored.
  __device__ __forceinline__ void open(const char* rows, const int32_t* index, const RowWidth& width, uint32_t first,
                                       int32_t k, int32_t end_k) {
    row_bytes_ = width.elements * 2;
    const uint32_t from = min(first + chunk(), width.chunks - 1);
    rows_ = rows + uint64_t{from} * 16;
    if (width.unit != 16) to_ = to_ / 16 * 16 + (8 - min(width.elements - 8 * from, 8u));
    index_ = index;
    k_ = k + static_cast<int32_t>(row());
    end_k_ = end_k;
    if constexpr (!kIndexed) rows_ += uint64_t{static_cast<uint32_t>(k_)} * row_bytes_;
    find();
  }

  // REQUIRES: the unit is 16.
  template <int kPart, int kParts>
  __device__ __forceinline__ void copy(uint32_t slot) const {
    using Range = CopyRange<kCopies, kPart, kParts>;
#pragma unroll
    for (int i = Range::kBegin; i < Range::kEnd; ++i) {
      const uint32_t from = kIndexed ? static_cast<uint32_t>(next_[i]) : i * kRowsAtOnce;
      const bool there = kIndexed ? next_[i] >= 0 : k_ + i * kRowsAtOnce < end_k_;
      copy_16(slot + to_ + i * kRowsAtOnce * kChunks * 16, rows_ + uint64_t{from} * row_bytes_, there);
    }
  }
  // Copies all of the next slot, of rows with any unit.
  __device__ __forceinline__ void copy_all(uint32_t slot, uint32_t unit) const {
    const uint32_t to = slot + to_ / 16 * 16;
    const auto in_chunk = static_cast<int32_t>(8 - to_ % 16);
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      int32_t from = i * kRowsAtOnce;
      if constexpr (kIndexed) {
        from = next_[0];
#pragma unroll
        for (int j = 1; j < kCopies; ++j) from = i == j ? next_[j] : from;
      }
      const bool there = kIndexed ? from >= 0 : k_ + from < end_k_;
      copy_elements(to + i * kRowsAtOnce * kChunks * 16, rows_ + uint64_t{static_cast<uint32_t>(from)} * row_bytes_,
                    there ? in_chunk : 0, unit);
    }
  }
  __device__ __forceinline__ void next() {
    k_ += kDepth;
    if constexpr (!kIndexed) rows_ += uint64_t{row_bytes_} * kDepth;
    find();
  }

 private:
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kChunks; }
  // The rows that the next slot has, found one slot before it is copied.
  __device__ __forceinline__ void find() {
    if constexpr (kIndexed) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int32_t k = k_ + i * kRowsAtOnce;
        next_[i] = row_in_source(index_, k, k < end_k_);
      }
    }
  }

  // In the lowest bits of to_: how many of eight elements the chunk lacks. So they need no register of their own.
  uint32_t to_, row_bytes_ = 0;
  int32_t k_ = 0, end_k_ = 0;
  const char* rows_ = nullptr;
  const int32_t* index_ = nullptr;
  int32_t next_[kIndexed ? kCopies : 1] = {};
};

// The part of a tile that a warp multiplies: 64 of its rows (or columns), 16 of k at a time, as four
// fragments of 16 x 16. kLeft: the operand is A, else B, where a fragment is two tiles of 16 x 8.
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
      // Two chunks further in a swizzled row is the exclusive or of the address with 32, since the tile begins at a
      // multiple of 128 bytes.
      const uint32_t at =
          kMajor == Major::k ? (at_ ^ kStep * 32) + i * 16 * kRowBytes : (at_ ^ i * 32) + kStep * 16 * kRowBytes;
      load_matrices<kMajor == Major::mn>(to[i], slot + at);
    }
  }

 private:
  uint32_t at_;
};

}  // namespace moebius::cuda::sm80
