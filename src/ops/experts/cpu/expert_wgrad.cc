// Weight gradients. They sum over the rows of an expert in chunks of a fixed size. Each chunk is added to the f32
// gradient in order; without accumulate the first one is stored.
#include "ops/cpu/vector.h"
#include "ops/experts/cpu/experts.h"
#include "ops/experts/experts_backends.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius {
namespace cpu {
namespace {

constexpr int64_t kChunk = 512;       // rows of an expert that are packed at once
constexpr int64_t kTileRows = 518;    // of dw[e], 37 panels
constexpr int64_t kPackedPanels = 8;  // of A at once: rows are read in pieces of 112 elements
constexpr int64_t kTilePanels = 16;   // of 32 columns

PanelSpace space_of(const Operand& left) {
  return {best_panel_math(math_dtype(left)).words, kChunk, kPackedPanels, kTilePanels, !left.is_plain()};
}

struct Tiles {
  explicit Tiles(const Tensor& dw)
      : M(dw.dim(1)), N(dw.dim(2)), down(div_ceil(M, kTileRows)), across(div_ceil(N, kTilePanels * kPanelCols)) {}
  int64_t M, N, down, across;
};

// A tile of dw[e] and the rows that it sums over.
struct GradTile {
  RowRange rows;
  int64_t first_m, num_m, first_n, num_n;
};

template <class T>
PanelRows rows_from(const Tensor& x, bool gather, const Rows& rows, int64_t begin, int64_t col) {
  const int64_t ld = x.dim(1);
  const T* base = x.ptr<T>() + col;
  return gather ? PanelRows{base, index_of(rows) + begin, ld} : PanelRows{base + begin * ld, nullptr, ld};
}

// Computes dw (+)= the sums of a tile of `num` rows and n columns.
void put_sums(const float* tile, int64_t num, float* dw, int64_t ld, int64_t n, bool add) {
  for (int64_t i = 0; i < num; ++i) {
    if (!add) {
      std::copy_n(tile + i * kPanelCols, n, dw + i * ld);
    } else if (n == kPanelCols) {
      for (int64_t c = 0; c < kPanelCols; ++c) dw[i * ld + c] += tile[i * kPanelCols + c];
    } else {
      for (int64_t c = 0; c < n; ++c) dw[i * ld + c] += tile[i * kPanelCols + c];
    }
  }
}

// An expert without rows has a gradient of zeros.
void clear(const Tensor& dw_eMN, const GradTile& t) {
  const int64_t M = dw_eMN.dim(1), N = dw_eMN.dim(2);
  float* dw = dw_eMN.ptr<float>() + (t.rows.expert * M + t.first_m) * N + t.first_n;
  for (int64_t i = 0; i < t.num_m; ++i) std::fill_n(dw + i * N, t.num_n, 0.0f);
}

// The rows [begin, begin + k) of a tile. The product over them is added to dw, or stored.
struct Chunk {
  int64_t begin, k;
  bool add;
};

template <class T>
void put_chunk(const ExpertWgrad& a, const PanelMath& math, const GradTile& t, const Chunk& chunk,
               const PanelSpace& space) {
  const int64_t begin = chunk.begin, k = chunk.k;
  const Tiles tiles(a.dw_eMN);
  float* dw = a.dw_eMN.ptr<float>() + (t.rows.expert * tiles.M + t.first_m) * tiles.N + t.first_n;
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    const int64_t m = t.first_m + first;
    pack_across(math.words, {to, kPanelRows, div_ceil(num, kPanelRows), space.a_stride},
                rows_from<T>(a.left_RM.data, a.gather_left, a.rows, begin, m), k, tiles.M - m);
  };
  const int64_t num_panels = div_ceil(t.num_n, kPanelCols);
  const auto pack_b = [&](uint32_t* to) {
    pack_across(math.words, {to, kPanelCols, num_panels, space.b_stride},
                rows_from<T>(a.right_RN.data, a.gather_right, a.rows, begin, t.first_n), k, tiles.N - t.first_n);
  };
  // Prefetches the old gradient from memory while the product is computed.
  const auto fetch = [&](int64_t first, int64_t num, int64_t j) {
    if (!chunk.add) return;
    prefetch_rows(dw + first * tiles.N + j * kPanelCols, num, tiles.N, std::min(kPanelCols, t.num_n - j * kPanelCols));
  };
  const auto put = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t n = std::min(kPanelCols, t.num_n - j * kPanelCols);
    put_sums(tile, num, dw + first * tiles.N + j * kPanelCols, tiles.N, n, chunk.add);
  };
  multiply_panels(math.by_word, space, {num_words(math.words, k), t.num_m, num_panels}, pack_a, pack_b, fetch, put);
}

// Does the same from quantised transposes, whose rows are the columns of left and right: k of their columns from
// `begin` on.
void put_quantised_chunk(const ExpertWgrad& a, const PanelMath& math, const GradTile& t, const Chunk& chunk,
                         const PanelSpace& space) {
  const int64_t begin = chunk.begin, k = chunk.k;
  const Tiles tiles(a.dw_eMN);
  float* dw = a.dw_eMN.ptr<float>() + (t.rows.expert * tiles.M + t.first_m) * tiles.N + t.first_n;
  const auto values = [&](const Operand& x, int64_t row, int64_t slot) {
    dequantize_row(space.values + slot * k, x, 0, row, begin, k);
    return space.values + slot * k;
  };
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    for (int64_t i = 0; i < num; i += kPanelRows, to += space.a_stride) {
      const void* row[kPanelRows];
      const int64_t rows = std::min(kPanelRows, num - i);
      for (int64_t r = 0; r < rows; ++r) row[r] = values(a.left_RM, t.first_m + first + i + r, r);
      pack_strips(math.words, to, row, rows, k);
    }
  };
  const int64_t num_panels = div_ceil(t.num_n, kPanelCols);
  const auto pack_b = [&](uint32_t* to) {
    for (int64_t j = 0; j < t.num_n; j += kPanelCols, to += space.b_stride) {
      const void* lane[kPanelCols] = {};
      for (int64_t l = 0; l < std::min(kPanelCols, t.num_n - j); ++l)
        lane[l] = values(a.right_RN, t.first_n + j + l, l);
      pack_along(math.words, to, lane, k);
    }
  };
  const auto put = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t n = std::min(kPanelCols, t.num_n - j * kPanelCols);
    put_sums(tile, num, dw + first * tiles.N + j * kPanelCols, tiles.N, n, chunk.add);
  };
  multiply_panels(math.by_strip, space, {num_words(math.words, k), t.num_m, num_panels}, pack_a, pack_b, kNothingBefore,
                  put);
}

// The bytes of the sums in f32, a multiple of 64, to which the panels after them are aligned.
int64_t bytes_of_sums(const Tensor& dw) { return div_ceil(dw.numel() * 4, int64_t{64}) * 64; }

// Computes the sums of a bf16 dw in scratch, and adds them in a pass.
void expert_wgrad_rounded(Stream& s, const ExpertWgrad& a) {
  const int64_t n = a.dw_eMN.numel(), bytes = bytes_of_sums(a.dw_eMN);
  ExpertWgrad sums = a;
  sums.dw_eMN = tensor_of(static_cast<float*>(a.scratch.data), a.dw_eMN.shape);
  sums.accumulate = false;
  sums.scratch = tensor_of(static_cast<uint8_t*>(a.scratch.data) + bytes, {a.scratch.num_bytes() - bytes});
  cpu::expert_wgrad(s, sums);
  cpu::sum_gradient(s, {.sum_n = a.dw_eMN.view({n}), .grad_n = sums.dw_eMN.view({n}), .adds = a.accumulate});
}

}  // namespace

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  if (a.dw_eMN.dtype == DType::bf16) return expert_wgrad_rounded(s, a);
  const PanelMath math = best_panel_math(math_dtype(a.left_RM));
  const Tiles tiles(a.dw_eMN);
  const int32_t* offsets = a.rows.offsets_e1.ptr<int32_t>();
  const int64_t per_expert = tiles.down * tiles.across;
  s.pool().run(a.dw_eMN.dim(0) * per_expert, [&](int64_t task, int worker) {
    const int64_t e = task / per_expert, m = task % per_expert / tiles.across * kTileRows;
    const int64_t n = task % tiles.across * kTilePanels * kPanelCols;
    const GradTile tile{{e, offsets[e], offsets[e + 1]},
                        m,
                        std::min(kTileRows, tiles.M - m),
                        n,
                        std::min(kTilePanels * kPanelCols, tiles.N - n)};
    const PanelSpace space(a.scratch.data, worker, space_of(a.left_RM));
    if (tile.rows.begin == tile.rows.end && !a.accumulate) clear(a.dw_eMN, tile);
    for (int64_t begin = tile.rows.begin; begin < tile.rows.end; begin += kChunk) {
      const int64_t k = std::min(kChunk, tile.rows.end - begin);
      const bool add = a.accumulate || begin > tile.rows.begin;
      if (!a.left_RM.is_plain()) {
        const int64_t column = group_begin(offsets[e], e) + begin - offsets[e], padded = padded_rows(k);
        put_quantised_chunk(a, math, tile, {column, padded, add}, space);
        continue;
      }
      with_float_type(a.left_RM.data.dtype, [&]<class T>(T) { put_chunk<T>(a, math, tile, {begin, k, add}, space); });
    }
  });
}

}  // namespace cpu

int64_t cpu::scratch_bytes(const ExpertWgrad& a, int num_threads) {
  const int64_t sums = a.dw_eMN.dtype == DType::bf16 ? cpu::bytes_of_sums(a.dw_eMN) : 0;
  return sums + num_threads * cpu::space_of(a.left_RM).num_bytes;
}

}  // namespace moebius
