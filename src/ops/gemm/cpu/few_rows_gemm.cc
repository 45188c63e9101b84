#include "ops/gemm/cpu/few_rows_gemm.h"

#include <algorithm>
#include <memory>

#include "ops/cpu/few_rows.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;  // of W: enough for a task, and few enough for many tasks
constexpr int64_t kTileColumns = 32;

// c (+)= sums, n <= kTileColumns of them.
template <class C>
void put_sums(C* c, const float* sums, int64_t n, bool add) {
  for (int64_t j = 0; j < n; j += kNumLanes) {
    const int64_t width = std::min(kNumLanes, n - j);
    const Lanes before = add ? load_lanes(c + j, width) : Lanes{};
    store_lanes(c + j, load_lanes(sums + j) + before, width);
  }
}

template <class T, class C>
void columns(const Gemm& a, const FewRows& x, int64_t begin, int64_t end) {
  const int64_t n = a.c_MN.dim(1);
  for (int64_t col = begin; col < end; col += kTileColumns) {
    const int64_t width = std::min(kTileColumns, end - col);
    float tile[kFewRows * kTileColumns];
    multiply_few_rows(tile, kTileColumns, x, a.b.data.ptr<T>() + col * x.k, width, n - col - width);
    for (int64_t i = 0; i < x.num_rows; ++i)
      put_sums(a.c_MN.ptr<C>() + i * n + col, tile + i * kTileColumns, width, a.accumulate);
  }
}

}  // namespace

bool has_few_rows(const Gemm& a) {
  return a.few_rows && a.c_MN.dim(0) <= kFewRows && a.trans_b && !a.trans_a && a.a.is_plain() && a.b.is_plain();
}

void few_rows_gemm(Stream& s, const Gemm& a) {
  const int64_t m = a.c_MN.dim(0), n = a.c_MN.dim(1), k = a.b.data.dim(1), size = size_of(a.b.data.dtype);
  FewRows x{.data = a.a.data.data, .num_rows = m, .k = k};
  std::unique_ptr<char[]> packed;
  if (m > kRowsTogether) {  // fewer are read in place: they fit in the nearest cache
    packed = std::make_unique_for_overwrite<char[]>(packed_bytes(a.a.data.dtype, m, k));
    const void* row[kFewRows];
    for (int64_t i = 0; i < m; ++i) row[i] = static_cast<const char*>(a.a.data.data) + i * k * size;
    x = pack_few_rows(a.a.data.dtype, packed.get(), row, m, k);
  }
  const int64_t cols = std::max<int64_t>(8, kTaskBytes / std::max<int64_t>(1, k * size) / 8 * 8);
  s.pool().run(div_ceil(n, cols), [&](int64_t task, int) {
    const int64_t begin = task * cols, end = std::min(n, begin + cols);
    with_float_type(a.a.data.dtype, [&]<class T>(T) {
      with_float_type(a.c_MN.dtype, [&]<class C>(C) { columns<T, C>(a, x, begin, end); });
    });
  });
}

}  // namespace moebius::cpu
