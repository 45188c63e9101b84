#include <array>
#include <cstring>

#include "ops/cpu/lanes.h"
#include "ops/cpu/transpose.h"
#include "ops/experts/cpu/panels.h"

namespace moebius::cpu {
namespace {

using WordLanes = LaneBits;
using HalfLanes = uint16_t __attribute__((vector_size(kLaneBytes / 2)));
constexpr int64_t kLanes = kNumLanes;

WordLanes load_words(const void* x) {
  WordLanes v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

WordLanes widen(const uint16_t* x) {
  HalfLanes half;
  std::memcpy(&half, x, sizeof half);
  return __builtin_convertvector(half, WordLanes);
}

// The ways to read each kind of words:
//   row     a register of consecutive words along k
//   across  one word of each lane, from one or two rows
//   piece   32 bits along k of each lane, of one or two elements: the unit that B panels transpose
struct PlainWords {
  using Element = uint32_t;
  static constexpr int64_t kPerWord = 1, kPerPiece = 1;
  static WordLanes row(const Element* x) { return load_words(x); }
  static WordLanes across(const Element* row, const Element*) { return load_words(row); }
  static void store_piece(uint32_t* to, WordLanes piece) { std::memcpy(to, &piece, sizeof piece); }
};

struct PairWords {
  using Element = uint16_t;
  static constexpr int64_t kPerWord = 2, kPerPiece = 2;
  static WordLanes row(const Element* x) { return load_words(x); }
  static WordLanes across(const Element* row, const Element* next) { return widen(row) | (widen(next) << 16); }
  static void store_piece(uint32_t* to, WordLanes piece) { std::memcpy(to, &piece, sizeof piece); }
};

struct WidenedWords {
  using Element = uint16_t;
  static constexpr int64_t kPerWord = 1, kPerPiece = 2;
  static WordLanes row(const Element* x) { return widen(x) << 16; }
  static WordLanes across(const Element* row, const Element*) { return widen(row) << 16; }
  static void store_piece(uint32_t* to, WordLanes piece) {
    const WordLanes low = piece << 16, high = piece & 0xffff0000u;
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + kPanelCols, &high, sizeof high);
  }
};

template <class F>
void with_words(Words words, F&& fn) {
  switch (words) {
    case Words::f32:
      return fn(PlainWords{});
    case Words::bf16_pairs:
      return fn(PairWords{});
    case Words::bf16_as_f32:
      return fn(WidenedWords{});
  }
}

// The elements of one row that a strip holds.
template <class W>
void pack_strip_row(uint32_t* to, const typename W::Element* x, int64_t num_elements) {
  const int64_t step = kLanes * W::kPerWord;
  int64_t i = 0;
  for (; i + step <= num_elements; i += step, to += kLanes) {
    const WordLanes v = W::row(x + i);
    std::memcpy(to, &v, sizeof v);
  }
  if (i == num_elements) return;
  typename W::Element part[kLanes * W::kPerWord] = {};
  std::memcpy(part, x + i, static_cast<size_t>(num_elements - i) * sizeof part[0]);
  const WordLanes v = W::row(part);
  std::memcpy(to, &v, sizeof v);
}

// Packs a register of lanes of a B panel. Pieces of 32 bits are transposed. If words are f32, the two bf16 of a piece
// are separated afterwards.
template <class W>
void pack_lanes_along(uint32_t* packed, const void* const* lane, int64_t k) {
  using Element = typename W::Element;
  constexpr int64_t kStep = kLanes * W::kPerPiece, kWordsOfPiece = W::kPerPiece / W::kPerWord;
  WordLanes m[kLanes];
  for (int64_t first = 0; first < k; first += kStep) {
    if (first + kStep <= k) {
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLanes; ++l) {
        m[l] = lane[l] ? load_words(static_cast<const Element*>(lane[l]) + first) : WordLanes{};
      }
    } else {
      for (int64_t l = 0; l < kLanes; ++l) {
        Element part[kStep] = {};
        const auto bytes = static_cast<size_t>(k - first) * sizeof(Element);
        if (lane[l]) std::memcpy(part, static_cast<const Element*>(lane[l]) + first, bytes);
        m[l] = load_words(part);
      }
    }
    transpose(m);
    uint32_t* to = packed + first / W::kPerWord * kPanelCols;
    const int64_t num_pieces = std::min(kLanes, (k - first + W::kPerPiece - 1) / W::kPerPiece);
    if (num_pieces == kLanes) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) W::store_piece(to + i * kWordsOfPiece * kPanelCols, m[i]);
    } else {
      for (int64_t i = 0; i < num_pieces; ++i) W::store_piece(to + i * kWordsOfPiece * kPanelCols, m[i]);
    }
  }
}

// next: null means zeros.
template <class W>
WordLanes load_across(const typename W::Element* row, const typename W::Element* next, int64_t num_valid) {
  if (num_valid >= kLanes && (next || W::kPerWord == 1)) return W::across(row, next);
  typename W::Element part[2][kLanes] = {};
  const auto bytes = static_cast<size_t>(std::clamp<int64_t>(num_valid, 0, kLanes)) * sizeof part[0][0];
  if (bytes > 0) std::memcpy(part[0], row, bytes);
  if (bytes > 0 && next) std::memcpy(part[1], next, bytes);
  return W::across(part[0], part[1]);
}

// Packs row by row through all panels, so that each row is read once and in order.
template <class W>
void pack_panels_across(const AcrossPanels& to, const PanelRows& rows, int64_t k, int64_t num_valid) {
  using Element = typename W::Element;
  const auto row = [&](int64_t i) {
    return static_cast<const Element*>(rows.base) + (rows.index ? rows.index[i] : i) * rows.ld;
  };
  uint32_t* word = to.packed;
  for (int64_t i = 0; i < k; i += W::kPerWord, word += to.num_lanes) {
    const Element *here = row(i), *next = W::kPerWord == 2 && i + 1 < k ? row(i + 1) : nullptr;
    for (int64_t p = 0; p < to.num_panels; ++p) {
      for (int64_t l = 0; l < to.num_lanes; l += kLanes) {
        const int64_t column = p * to.num_lanes + l;
        const WordLanes v = load_across<W>(here + column, next ? next + column : nullptr, num_valid - column);
        std::memcpy(word + p * to.panel_stride + l, &v, sizeof v);
      }
    }
  }
}

}  // namespace

void pack_strips(Words words, uint32_t* packed, const void* const* row, int64_t num_rows, int64_t k) {
  with_words(words, [&]<class W>(W) {
    constexpr int64_t kElements = kStripWords * W::kPerWord;
    for (int64_t first = 0; first < k; first += kElements, packed += kPanelRows * kStripStride) {
      for (int64_t i = 0; i < num_rows; ++i) {
        const auto* x = static_cast<const typename W::Element*>(row[i]) + first;
        pack_strip_row<W>(packed + i * kStripStride, x, std::min(kElements, k - first));
      }
    }
  });
}

void pack_along(Words words, uint32_t* packed, const void* const* lane, int64_t k) {
  with_words(words, [&]<class W>(W) {
    for (int64_t l = 0; l < kPanelCols; l += kLanes) pack_lanes_along<W>(packed + l, lane + l, k);
  });
}

void pack_across(Words words, const AcrossPanels& to, const PanelRows& rows, int64_t k, int64_t num_valid) {
  with_words(words, [&]<class W>(W) { pack_panels_across<W>(to, rows, k, num_valid); });
}

}  // namespace moebius::cpu
