#include <array>
#include <cstring>

#include "ops/experts/panels_cpu.h"

namespace moebius::cpu {
namespace {

using WordLanes = uint32_t __attribute__((vector_size(64)));
using HalfLanes = uint16_t __attribute__((vector_size(32)));
constexpr int64_t kLanes = 16;

// What a kind of words reads: 16 words from k on along a lane, and word w of 16 lanes across rows.
struct PlainWords {
  using Element = uint32_t;
  static constexpr int64_t kPerWord = 1;
  static WordLanes along(const Element* x) {
    WordLanes v;
    std::memcpy(&v, x, sizeof v);
    return v;
  }
  static WordLanes across(const Element* row, const Element*) { return along(row); }
};

struct PairWords {
  using Element = uint16_t;
  static constexpr int64_t kPerWord = 2;
  static WordLanes along(const Element* x) {
    WordLanes v;
    std::memcpy(&v, x, sizeof v);
    return v;
  }
  static WordLanes widen(const Element* x) {
    HalfLanes half;
    std::memcpy(&half, x, sizeof half);
    return __builtin_convertvector(half, WordLanes);
  }
  static WordLanes across(const Element* row, const Element* next) { return widen(row) | (widen(next) << 16); }
};

struct WidenedWords {
  using Element = uint16_t;
  static constexpr int64_t kPerWord = 1;
  static WordLanes along(const Element* x) { return PairWords::widen(x) << 16; }
  static WordLanes across(const Element* row, const Element*) { return along(row); }
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

// Lanes l of a and b: those whose bit `Step` is clear stay in a's place, the others in b's.
template <int Step, size_t... l>
[[gnu::always_inline]] inline void exchange(WordLanes& a, WordLanes& b, std::index_sequence<l...>) {
  const WordLanes x = a, y = b;
  a = __builtin_shufflevector(x, y, (l & Step ? kLanes + l - Step : l)...);
  b = __builtin_shufflevector(x, y, (l & Step ? kLanes + l : l + Step)...);
}

template <int Step>
[[gnu::always_inline]] inline void exchange_rows(WordLanes (&m)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & Step) == 0) exchange<Step>(m[i], m[i + Step], std::make_index_sequence<kLanes>{});
  }
}

// m[i][j] <-> m[j][i], by halves: 64 shuffles for 256 words.
[[gnu::always_inline]] inline void transpose(WordLanes (&m)[kLanes]) {
  exchange_rows<8>(m);
  exchange_rows<4>(m);
  exchange_rows<2>(m);
  exchange_rows<1>(m);
}

template <class W>
WordLanes load_part(const typename W::Element* x, int64_t num_elements) {
  typename W::Element part[kLanes * W::kPerWord] = {};
  std::memcpy(part, x, static_cast<size_t>(num_elements) * sizeof part[0]);
  return W::along(part);
}

// 16 lanes from first_lane on. Stores of lanes past the panel are overwritten by the next word's.
template <class W>
void pack_lanes_along(uint32_t* packed, int64_t num_lanes, const void* const* lane, int64_t num_valid, int64_t k) {
  const int64_t words = (k + W::kPerWord - 1) / W::kPerWord, step = kLanes * W::kPerWord;
  WordLanes m[kLanes];
  for (int64_t w = 0; w < words; w += kLanes) {
    const int64_t first = w * W::kPerWord;
    for (int64_t l = 0; l < kLanes; ++l) {
      const auto* x = l < num_valid ? static_cast<const typename W::Element*>(lane[l]) : nullptr;
      if (!x)
        m[l] = WordLanes{};
      else if (first + step <= k)
        m[l] = W::along(x + first);
      else
        m[l] = load_part<W>(x + first, k - first);
    }
    transpose(m);
    const int64_t num = std::min(kLanes, words - w);
    for (int64_t i = 0; i < num; ++i) std::memcpy(packed + (w + i) * num_lanes, &m[i], sizeof m[i]);
  }
}

template <class W>
WordLanes load_across(const typename W::Element* row, const typename W::Element* next, int64_t num_valid) {
  if (num_valid >= kLanes) return W::across(row, next);
  typename W::Element part[2][kLanes] = {};
  const auto bytes = static_cast<size_t>(std::max<int64_t>(0, num_valid)) * sizeof part[0][0];
  if (bytes > 0) {
    std::memcpy(part[0], row, bytes);
    std::memcpy(part[1], next, bytes);
  }
  return W::across(part[0], part[1]);
}

template <class W>
void pack_lanes_across(uint32_t* packed, int64_t num_lanes, const PanelRows& rows, int64_t k, int64_t num_valid) {
  using Element = typename W::Element;
  static constexpr Element kZeros[kPanelCols] = {};
  const auto row = [&](int64_t i) {
    return static_cast<const Element*>(rows.base) + (rows.index ? rows.index[i] : i) * rows.ld;
  };
  for (int64_t i = 0; i < k; i += W::kPerWord, packed += num_lanes) {
    const Element* here = row(i);
    const Element* next = i + 1 < k ? row(i + 1) : kZeros;
    for (int64_t l = 0; l < num_lanes; l += kLanes) {
      const WordLanes v = load_across<W>(here + l, next + l, num_valid - l);
      std::memcpy(packed + l, &v, sizeof v);
    }
  }
}

}  // namespace

void pack_along(Words words, uint32_t* packed, int64_t num_lanes, const void* const* lane, int64_t k) {
  with_words(words, [&]<class W>(W) {
    for (int64_t l = 0; l < num_lanes; l += kLanes) {
      pack_lanes_along<W>(packed + l, num_lanes, lane + l, num_lanes - l, k);
    }
  });
}

void pack_across(Words words, uint32_t* packed, int64_t num_lanes, const PanelRows& rows, int64_t k,
                 int64_t num_valid) {
  with_words(words, [&]<class W>(W) { pack_lanes_across<W>(packed, num_lanes, rows, k, num_valid); });
}

}  // namespace moebius::cpu
