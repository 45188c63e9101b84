// Matrix products by packed panels, after Goto & van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", TOMS 34(3), 2008:
//   tile[i][j] = sum over k of a[i][k] b[j][k],   14 rows i of an A panel by 32 columns j of a B panel
// Operands are packed into 32-bit words, one f32 or two bf16 that follow each other in k, so that
// one kernel serves both: broadcast a word of A, multiply it into 32 words of B. Packing gathers,
// widens, transposes and pads on the way. A sum runs over k in order in one accumulator: it does
// not depend on the other rows or columns, nor on threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/error.h"

namespace moebius::cpu {

constexpr int64_t kPanelRows = 14;  // 14 x 2 sums, 2 words of B and a broadcast fill the 32 registers of AVX-512
constexpr int64_t kPanelCols = 32;

// How elements are stored in 32-bit words.
enum class Words { f32, bf16_pairs, bf16_as_f32 };

// Returns the number of words for k elements of one row; the last one is padded with zero.
inline int64_t num_words(Words words, int64_t k) { return words == Words::bf16_pairs ? (k + 1) / 2 : k; }

// tile[i * 32 + j] for i < num_rows <= 14.
using PanelKernel = void (*)(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words, int64_t num_rows);

struct PanelMath {
  Words words;
  PanelKernel by_strip;  // a from pack_strips
  PanelKernel by_word;   // a from pack_across
};
// Sets maths to the kernels of this CPU for the dtype, the fastest first; the last one runs on any CPU.
// Returns their number.
int panel_maths(DType dtype, PanelMath (&maths)[3]);
inline PanelMath best_panel_math(DType dtype) {
  PanelMath maths[3];
  panel_maths(dtype, maths);
  return maths[0];
}

// A panel of rows in their own order: strips of 256 words, with each row of a strip contiguous. 16 words separate the
// rows, so that they do not map to the same cache sets.
constexpr int64_t kStripWords = 256, kStripStride = kStripWords + 16;
inline int64_t strip_panel_words(int64_t num_words) {
  return (num_words + kStripWords - 1) / kStripWords * kPanelRows * kStripStride;
}
void pack_strips(Words words, uint32_t* packed, const void* const* row, int64_t num_rows, int64_t k);

// Packs a B panel from columns that are contiguous in k: packed[w * 32 + l] = word w of lane[l][0, k); null lanes are
// zeros. Writes up to 32 words past the panel.
void pack_along(Words words, uint32_t* packed, const void* const* lane, int64_t k);

// Rows of k: row k is at base + (index ? index[k] : k) * ld elements.
struct PanelRows {
  const void* base;
  const int32_t* index;
  int64_t ld;
};

// num_panels panels of 14 or 32 lanes, panel_stride words apart, from rows that run across:
// packed[w * num_lanes + l] holds elements l of rows 2w and 2w + 1 (or of row w). Rows have
// num_valid elements from here on; lanes past them are zeros. Writes up to 2 words past a panel.
struct AcrossPanels {
  uint32_t* packed;
  int64_t num_lanes, num_panels, panel_stride;
};
void pack_across(Words words, const AcrossPanels& to, const PanelRows& rows, int64_t k, int64_t num_valid);

// A worker's memory: packed B panels, packed A panels, one tile of sums, and for quantised operands the values of 32
// rows, which are then packed. Panels are an odd number of cache lines apart, so that the same word of several panels
// does not map to the same cache set.
struct PanelSpace {
  PanelSpace(Words words, int64_t k, int64_t a_panels, int64_t b_panels, bool quantised = false)
      : a_panels(a_panels),
        b_panels(b_panels),
        a_stride(odd_lines(strip_panel_words(num_words(words, k)))),
        b_stride(odd_lines(num_words(words, k) * kPanelCols + kPanelCols)),
        num_bytes(4 * (a_stride * a_panels + b_stride * b_panels + kPanelRows * kPanelCols +
                       (quantised ? odd_lines(kPanelCols * k) : 0))) {}
  PanelSpace(void* base, int worker, const PanelSpace& of) : PanelSpace(of) {
    b = reinterpret_cast<uint32_t*>(static_cast<char*>(base) + worker * num_bytes);
    a = b + b_stride * b_panels;
    tile = reinterpret_cast<float*>(a + a_stride * a_panels);
    values = tile + kPanelRows * kPanelCols;
  }
  static int64_t odd_lines(int64_t words) { return ((words + 15) / 16 | 1) * 16; }

  int64_t a_panels, b_panels, a_stride, b_stride, num_bytes;
  uint32_t *b = nullptr, *a = nullptr;
  float *tile = nullptr, *values = nullptr;
};

// Returns the number of B panels that fit into half of a 2 MiB L2, at most num_panels.
inline int64_t panels_at_once(Words words, int64_t k, int64_t num_panels) {
  constexpr int64_t kBytes = 1 << 20;
  return std::clamp<int64_t>(kBytes / (num_words(words, k) * kPanelCols * 4 + 1), 1, num_panels);
}

struct PanelCounts {
  int64_t num_words, num_rows, num_panels;
};

// pack_b(space.b) for all panels; then for as many rows as A panels hold: pack_a(first, num,
// space.a), and for each 14 of them and each panel j: before(first, num, j), the product,
// after(first, num, j, tile).
template <class PackA, class PackB, class Before, class After>
void multiply_panels(PanelKernel kernel, const PanelSpace& space, const PanelCounts& counts, PackA&& pack_a,
                     PackB&& pack_b, Before&& before, After&& after) {
  pack_b(space.b);
  const int64_t group = kPanelRows * space.a_panels;
  for (int64_t packed = 0; packed < counts.num_rows; packed += group) {
    const int64_t end = std::min(counts.num_rows, packed + group);
    pack_a(packed, end - packed, space.a);
    for (int64_t first = packed; first < end; first += kPanelRows) {
      const int64_t num = std::min(kPanelRows, end - first);
      const uint32_t* a = space.a + (first - packed) / kPanelRows * space.a_stride;
      for (int64_t j = 0; j < counts.num_panels; ++j) {
        before(first, num, j);
        kernel(space.tile, a, space.b + j * space.b_stride, counts.num_words, num);
        after(first, num, j, space.tile);
      }
    }
  }
}

}  // namespace moebius::cpu
