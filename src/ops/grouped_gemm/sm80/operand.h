// The path of an operand to the tensor cores: from rows in global memory to a swizzled tile in a slot of shared memory,
// and from there to the registers of a warp.
#pragma once

#include "ops/sm80/elements.h"
#include "ops/sm80/mma.h"

namespace moebius::cuda::sm80 {

// The width of rows of bf16. A chunk is eight elements; the last one of a row may have fewer. Rows are in chunks if all
// of these are whole and begin at multiples of 16 bytes. The kernels for these rows have no code for others. Rows of
// any other width have kernels of their own, for one config only.
struct RowWidth {
  uint32_t elements, chunks;
  uint32_t unit;  // bytes that can be copied at a time: 16 if the rows are in chunks, else 4 or 2
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

// Copies a chunk of kCopies rows, which are `pitch` bytes apart in shared memory. chunk_of(i) returns that of row i:
// where it is, and how many elements it has. All reads are on their way before the first one is waited for.
struct AnyChunk {
  const char* from;
  int32_t elements;
};
template <int kCopies, class ChunkOf>
__device__ __forceinline__ void copy_chunks(uint32_t to, uint32_t pitch, uint32_t unit, ChunkOf chunk_of) {
  if (unit != 2) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const AnyChunk chunk = chunk_of(i);
      copy_elements(to + i * pitch, chunk.from, chunk.elements, unit);
    }
    return;
  }
  uint32_t words[kCopies][4];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const AnyChunk chunk = chunk_of(i);
    load_elements(words[i], chunk.from, chunk.elements);
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) store_16(to + i * pitch, words[i]);
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

 private:
  int32_t first_ = 0, last_ = 0;
};

// Tiles whose rows run along k: kRows of them, kDepth elements deep. A thread copies one chunk of kCopies rows,
// those that SourceRows names. If the tile has fewer rows, the others can be any rows, since their elements of the
// product are not stored.
template <int kRows, int kDepth, int kThreads, template <int, int> class SourceRowsOf, bool kInChunks>
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
    pitch_ = kInChunks ? width.chunks : width.elements;
    left_ = static_cast<int32_t>(pitch_) - static_cast<int32_t>(kInChunks ? chunk() : chunk() * 8);
    source_rows_ = source_rows;
  }

  // Copies a part of the next slot of k: slots are copied in order, with next() between them.
  template <int kPart, int kParts>
  __device__ __forceinline__ void copy(uint32_t slot) const {
    using Range = CopyRange<kCopies, kPart, kParts>;
#pragma unroll
    for (int i = Range::kBegin; i < Range::kEnd; ++i) {
      const uint32_t from = static_cast<uint32_t>(source_rows_.row(i)) * pitch_;
      copy_16(slot + to_ + i * kRowsAtOnce * kChunks * 16, rows_ + uint64_t{from} * 16, left_ > 0);
    }
  }
  // Copies all of the next slot, if not kInChunks.
  __device__ __forceinline__ void copy_any_width(uint32_t slot, uint32_t unit) const {
    copy_chunks<kCopies>(slot + to_, kRowsAtOnce * kChunks * 16, unit, [&](int i) {
      const uint64_t from = uint64_t{static_cast<uint32_t>(source_rows_.row(i))} * pitch_;
      return AnyChunk{rows_ + from * 2, left_};
    });
  }
  __device__ __forceinline__ void next() {
    rows_ += kChunks * 16;
    left_ -= kInChunks ? kChunks : kDepth;
  }

 private:
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kChunks; }

  uint32_t to_;
  uint32_t pitch_ = 0;  // from a row to the next, in chunks, or in elements if not kInChunks
  int32_t left_ = 0;    // the same from the next chunk on
  const char* rows_ = nullptr;
  SourceRows source_rows_{};
};

// Tiles whose rows run along m (or n): kDepth rows of kCols elements. A thread copies one chunk of each of
// kCopies rows.
template <int kCols, int kDepth, int kThreads, bool kIndexed, bool kInChunks>
class RowsAcrossK {
 public:
  static constexpr int kChunks = kCols / 8, kRowsAtOnce = kThreads / kChunks, kCopies = kDepth / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && kCopies * kRowsAtOnce == kDepth);

  __device__ __forceinline__ RowsAcrossK() : to_(swizzled<kChunks>(row(), chunk())) {}

  // Begins at rows [k, end_k) of the source, from chunk `first` on. Past the last chunk of a row the last one is read:
  // it only gives elements of the product that are not stored.
  __device__ __forceinline__ void open(const char* rows, const int32_t* index, const RowWidth& width, uint32_t first,
                                       int32_t k, int32_t end_k) {
    const uint32_t from = min(first + chunk(), width.chunks - 1);
    row_bytes_ = kInChunks ? width.chunks * 16 : width.elements * 2;
    rows_ = rows + uint64_t{from} * 16;
    if constexpr (!kInChunks) elements_ = static_cast<int32_t>(width.elements - 8 * from);
    index_ = index;
    k_ = k + static_cast<int32_t>(row());
    end_k_ = end_k;
    if constexpr (!kIndexed) rows_ += uint64_t{static_cast<uint32_t>(k_)} * row_bytes_;
    find();
  }

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
  // Copies all of the next slot, if not kInChunks.
  __device__ __forceinline__ void copy_any_width(uint32_t slot, uint32_t unit) const {
    copy_chunks<kCopies>(slot + to_, kRowsAtOnce * kChunks * 16, unit, [&](int i) {
      const uint32_t from = kIndexed ? static_cast<uint32_t>(next_[i]) : i * kRowsAtOnce;
      const bool there = kIndexed ? next_[i] >= 0 : k_ + i * kRowsAtOnce < end_k_;
      return AnyChunk{rows_ + uint64_t{from} * row_bytes_, there ? elements_ : 0};
    });
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

  uint32_t to_, row_bytes_ = 0;
  int32_t k_ = 0, end_k_ = 0;
  int32_t elements_ = 0;  // of a row from this thread's chunk on, if not kInChunks
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
