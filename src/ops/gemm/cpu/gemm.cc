#include "ops/gemm/gemm.h"

#include <algorithm>
#include <cstring>

#include "ops/gemm/cpu/few_rows_gemm.h"
#include "ops/gemm/cpu/tile_gemm.h"
#include "ops/gemm/gemm_backends.h"

namespace moebius::cpu {
namespace {

// Tiles of C are tasks. K is never split: a sum has one order.
struct TileSize {
  int64_t rows = 512, cols = 512;
};

// Depends only on the shape, never on the number of threads. Large tiles reuse more data, but a small C should still
// keep a few threads busy.
TileSize tile_size(int64_t m, int64_t n) {
  constexpr int64_t kEnough = 8, kSmallest = 128;
  TileSize t;
  while (div_ceil(m, t.rows) * div_ceil(n, t.cols) < kEnough && std::max(t.rows, t.cols) > kSmallest) {
    (t.rows >= t.cols ? t.rows : t.cols) /= 2;
  }
  return t;
}

// A quantised operand is summed over whole rows, so only the first row changes.
Matrix part_of(const Operand& x, int64_t row, int64_t col, bool transposed) {
  if (!x.is_plain()) return {.quantised = &x, .first = std::max(row, col)};
  const Tensor& t = x.data;
  const int64_t ld = t.dim(1), offset = transposed ? col * ld + row : row * ld + col;
  return {static_cast<char*>(t.data) + offset * size_of(t.dtype), ld, t.dtype, transposed};
}

}  // namespace

void gemm(Stream& s, const Gemm& a) {
  const int64_t m = a.c_MN.dim(0), n = a.c_MN.dim(1), k = a.a.shape()[a.trans_a ? 0 : 1];
  if (k == 0) {
    if (!a.accumulate) std::memset(a.c_MN.data, 0, a.c_MN.num_bytes());
    return;
  }
  if (has_few_rows(a)) return few_rows_gemm(s, a);
  const TileSize tile = tile_size(m, n);
  const int64_t tiles_across = div_ceil(n, tile.cols);
  s.pool().run(div_ceil(m, tile.rows) * tiles_across, [&](int64_t task, int) {
    const int64_t row = task / tiles_across * tile.rows, col = task % tiles_across * tile.cols;
    tile_gemm({.c = part_of(a.c_MN, row, col, false),
               .a = part_of(a.a, row, 0, a.trans_a),
               .b = part_of(a.b, 0, col, a.trans_b),
               .m = std::min(tile.rows, m - row),
               .n = std::min(tile.cols, n - col),
               .k = k,
               .accumulate = a.accumulate});
  });
}

}  // namespace moebius::cpu
