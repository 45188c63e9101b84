// Matrix products by packed panels, after Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
// TOMS 34(3), 2008:
//   tile[i][j] = sum over k of a[i][k] b[j][k],   14 rows i of an A panel by 32 columns j of a B panel
// Operands are packed into 32-bit words, one f32 or two bf16 that follow each other in k, so that one kernel serves
// both: broadcast a word of A, multiply it into 32 words of B. Packing gathers, widens, transposes and pads on the way.
// A sum runs over k in order in one accumulator: it does not depend on the other rows or columns, nor on threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/error.h"

namespace moebius::cpu {

constexpr int64_t kPanelRows = 14;  // 14 x 2 sums, 2 words of B and a broadcast fill the 32 registers of AVX-512
constexpr int64_t kPanelCols = 32;

// How elements become words.
enum class Words { f32, bf16_pairs, bf16_as_f32 };

// k elements of one row as words; the last one is padded with zero.
inline int64_t num_words(Words words, int64_t k) { return words == Words::bf16_pairs ? (k + 1) / 2 : k; }

// tile[i * 32 + j] for i < num_rows <= 14.
using PanelKernel = void (*)(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words, int64_t num_rows);

struct PanelMath {
  Words words;
  PanelKernel by_strip;  // a from pack_strips
  PanelKernel by_word;   // a from pack_across
};
// The ways this CPU can multiply that dtype, the best one first; the last one runs anywhere.
int panel_maths(DType dtype, PanelMath (&maths)[3]);
inline PanelMath best_panel_math(DType dtype) {
  PanelMath maths[3];
  panel_maths(dtype, maths);
  return maths[0];
}

// A panel of rows as they are: strips of 256 words, each row of a strip in one piece (and 16 words between the rows, so
// that they do not meet in the sets of a cache).
constexpr int64_t kStripWords = 256, kStripStride = kStripWords + 16;
inline int64_t strip_panel_words(int64_t num_words) {
  return (num_words + kStripWords - 1) / kStripWords * kPanelRows * kStripStride;
}
void pack_strips(Words words, uint32_t* packed, const void* const* row, int64_t num_rows, int64_t k);

// A B panel from columns that are contiguous in k: packed[w * 32 + l] = word w of lane[l][0, k); null lanes are zeros.
// Writes up to 32 words past the panel.
void pack_along(Words words, uint32_t* packed, const void* const* lane, int64_t k);

// Rows of k: row k is at base + (index ? index[k] : k) * ld elements.
struct PanelRows {
  const void* base;
  const int32_t* index;
  int64_t ld;
};
// The same from rows that stand across: word w of lane l holds elements l of rows 2w and 2w + 1 (or of row w). Rows
// have num_valid elements from here on; lanes past them are zeros. Writes up to 2 words past the panel.
void pack_across(Words words, uint32_t* packed, int64_t num_lanes, const PanelRows& rows, int64_t k, int64_t num_valid);

// A worker's memory: packed B panels, one packed A panel, one tile of sums.
struct PanelSpace {
  PanelSpace(void* base, int worker, Words words, int64_t k, int64_t num_panels)
      : b_stride(num_words(words, k) * kPanelCols), num_bytes(bytes(words, k, num_panels)) {
    char* slice = static_cast<char*>(base) + worker * num_bytes;
    b = reinterpret_cast<uint32_t*>(slice);
    a = b + align(b_stride * num_panels + kPanelCols);
    tile = reinterpret_cast<float*>(a + align(strip_panel_words(num_words(words, k))));
  }
  static int64_t bytes(Words words, int64_t k, int64_t num_panels) {
    const int64_t w = num_words(words, k);
    return 4 *
           (align(w * kPanelCols * num_panels + kPanelCols) + align(strip_panel_words(w)) + kPanelRows * kPanelCols);
  }
  static int64_t align(int64_t count) { return (count + 15) / 16 * 16; }

  int64_t b_stride, num_bytes;
  uint32_t *b, *a;
  float* tile;
};

// B panels that fit half of a 2 MiB L2, of those that there are.
inline int64_t panels_at_once(Words words, int64_t k, int64_t num_panels) {
  constexpr int64_t kBytes = 1 << 20;
  return std::clamp<int64_t>(kBytes / (num_words(words, k) * kPanelCols * 4 + 1), 1, num_panels);
}

// Copies the first n of `count` elements; the usual n == count without a call.
template <int64_t count, class T>
[[gnu::always_inline]] inline void copy_first(T* to, const T* from, int64_t n) {
  if (n == count)
    std::memcpy(to, from, count * sizeof(T));
  else
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
}

// pack_b(j, to) for all panels; then for each 14 rows: pack_a(first, num, to), and for each panel j: before(first, num,
// j), the product, after(first, num, j, tile).
template <class PackA, class PackB, class Before, class After>
void multiply_panels(PanelKernel kernel, const PanelSpace& space, int64_t num_words, int64_t num_rows,
                     int64_t num_panels, PackA&& pack_a, PackB&& pack_b, Before&& before, After&& after) {
  for (int64_t j = 0; j < num_panels; ++j) pack_b(j, space.b + j * space.b_stride);
  for (int64_t first = 0; first < num_rows; first += kPanelRows) {
    const int64_t num = std::min(kPanelRows, num_rows - first);
    pack_a(first, num, space.a);
    for (int64_t j = 0; j < num_panels; ++j) {
      before(first, num, j);
      kernel(space.tile, space.a, space.b + j * space.b_stride, num_words, num);
      after(first, num, j, space.tile);
    }
  }
}

}  // namespace moebius::cpu
