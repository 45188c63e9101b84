#include "ops/gemm/gemm.h"

#include <algorithm>
#include <cstring>

#include "ops/backends.h"
#include "ops/gemm/tile_gemm.h"

namespace moebius::cpu {
namespace {

// Tiles of C are tasks. They do not depend on the number of threads, and K is never split: a sum has one order.
constexpr int64_t kTileRows = 512;
constexpr int64_t kTileCols = 512;

Matrix part_of(const Tensor& t, int64_t row, int64_t col, bool transposed) {
  const int64_t ld = t.dim(1), offset = transposed ? col * ld + row : row * ld + col;
  return {static_cast<char*>(t.data) + offset * size_of(t.dtype), ld, t.dtype, transposed};
}

}  // namespace

void gemm(Stream& s, const Gemm& a) {
  const int64_t m = a.c_MN.dim(0), n = a.c_MN.dim(1), k = a.a.dim(a.trans_a ? 0 : 1);
  if (k == 0) {
    if (!a.accumulate) std::memset(a.c_MN.data, 0, a.c_MN.num_bytes());
    return;
  }
  const int64_t tiles_across = div_ceil(n, kTileCols);
  s.pool().run(div_ceil(m, kTileRows) * tiles_across, [&](int64_t task, int) {
    const int64_t row = task / tiles_across * kTileRows, col = task % tiles_across * kTileCols;
    tile_gemm({.c = part_of(a.c_MN, row, col, false),
               .a = part_of(a.a, row, 0, a.trans_a),
               .b = part_of(a.b, 0, col, a.trans_b),
               .m = std::min(kTileRows, m - row),
               .n = std::min(kTileCols, n - col),
               .k = k,
               .accumulate = a.accumulate});
  });
}

}  // namespace moebius::cpu
