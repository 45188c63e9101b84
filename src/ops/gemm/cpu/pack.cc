#include "ops/gemm/cpu/pack.h"

#include <algorithm>
#include <cstring>

namespace moebius::cpu {
namespace {

constexpr int kLanes = kNumLanes;
using Words = LaneBits;

// Swaps the lanes of a and b at distance d: the step of a transpose by recursive halving.
template <int d>
inline void exchange(Words& a, Words& b) {
  Words low, high;
  for (int e = 0; e < kLanes; ++e) {
    low[e] = e & d ? kLanes + e - d : e;
    high[e] = e & d ? kLanes + e : e + d;
  }
  const Words first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}

template <int d>
inline void exchange_all(Words (&block)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & d)) exchange<d>(block[i], block[i + d]);
  }
}

// Loads a block of kLanes x kLanes 32-bit words, with rows `stride_bytes` apart, and transposes it.
inline void load_transposed(Words (&block)[kLanes], const void* rows, int64_t stride_bytes) {
  for (int i = 0; i < kLanes; ++i)
    std::memcpy(&block[i], static_cast<const char*>(rows) + i * stride_bytes, sizeof(Words));
  if constexpr (kLanes > 8) exchange_all<8>(block);
  if constexpr (kLanes > 4) exchange_all<4>(block);
  exchange_all<2>(block);
  exchange_all<1>(block);
}

// Packs kLanes columns of a panel from as many rows of the transpose, for as many p as one vector holds.
// Returns their number.
inline int64_t pack_block(float* to, const float* b, int64_t ld) {
  Words block[kLanes];
  load_transposed(block, b, ld * static_cast<int64_t>(sizeof(float)));
  for (int p = 0; p < kLanes; ++p) std::memcpy(to + p * kPanelCols, &block[p], sizeof(Words));
  return kLanes;
}

// A word holds two bf16, the even p in its low half; f32 is bf16 with 16 zero bits below.
inline int64_t pack_block(float* to, const bf16* b, int64_t ld) {
  Words block[kLanes];
  load_transposed(block, b, ld * static_cast<int64_t>(sizeof(bf16)));
  for (int p = 0; p < kLanes; ++p) {
    const Words even = block[p] << 16, odd = block[p] & 0xffff0000u;
    std::memcpy(to + 2 * p * kPanelCols, &even, sizeof(Words));
    std::memcpy(to + (2 * p + 1) * kPanelCols, &odd, sizeof(Words));
  }
  return 2 * kLanes;
}

}  // namespace

template <class T>
void widen(float* to, int64_t to_ld, const T* x, int64_t ld, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
    float* row = to + i * to_ld;
    const T* from = x + i * ld;
#pragma omp simd
    for (int64_t j = 0; j < cols; ++j) row[j] = to_f32(from[j]);
  }
}

template <int64_t kCols, class T>
void pack_panels(float* to, const T* b, int64_t ld, int64_t k, int64_t n) {
  const int64_t whole = n / kCols, rest = n % kCols;
  for (int64_t p = 0; p < k; ++p, b += ld) {
    float* row = to + p * kCols;
    for (int64_t panel = 0; panel < whole; ++panel, row += k * kCols) {
#pragma omp simd
      for (int64_t j = 0; j < kCols; ++j) row[j] = to_f32(b[panel * kCols + j]);
    }
    if (rest == 0) continue;
    for (int64_t j = 0; j < kCols; ++j) row[j] = j < rest ? to_f32(b[whole * kCols + j]) : 0.0f;
  }
}

template <class T>
void pack_panels_transposed(float* to, const T* b, int64_t ld, int64_t k, int64_t n) {
  constexpr int64_t kDepth = kLanes * sizeof(float) / sizeof(T);  // p in a vector
  for (int64_t j = 0; j < n; j += kPanelCols, to += k * kPanelCols) {
    const int64_t cols = std::min(kPanelCols, n - j);
    if (cols < kPanelCols) std::fill(to, to + k * kPanelCols, 0.0f);
    for (int64_t first = 0; first < cols; first += kLanes) {
      const T* rows = b + (j + first) * ld;
      int64_t p = 0;
      if (cols - first >= kLanes) {
        while (p + kDepth <= k) p += pack_block(to + p * kPanelCols + first, rows + p, ld);
      }
      for (; p < k; ++p) {
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, cols - first); ++i)
          to[p * kPanelCols + first + i] = to_f32(rows[i * ld + p]);
      }
    }
  }
}

template void widen(float*, int64_t, const float*, int64_t, int64_t, int64_t);
template void widen(float*, int64_t, const bf16*, int64_t, int64_t, int64_t);
template void pack_panels<kPanelCols>(float*, const float*, int64_t, int64_t, int64_t);
template void pack_panels<kPanelCols>(float*, const bf16*, int64_t, int64_t, int64_t);
template void pack_panels<kRowPanel>(float*, const float*, int64_t, int64_t, int64_t);
template void pack_panels<kRowPanel>(float*, const bf16*, int64_t, int64_t, int64_t);
template void pack_panels_transposed(float*, const float*, int64_t, int64_t, int64_t);
template void pack_panels_transposed(float*, const bf16*, int64_t, int64_t, int64_t);

}  // namespace moebius::cpu
