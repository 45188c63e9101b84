#include "ops/gemm/cpu/few_rows_gemm.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "ops/cpu/few_rows.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

// Columns of a block: a multiple of those of a kernel, and few enough that threads end together.
constexpr int64_t kBlockColumns = 48, kTileColumns = 32;
static_assert(kFewRows <= kMaxFewRows);

// Kernels read packed rows in whole lines.
struct alignas(64) CacheLine {
  char bytes[64];
};

// Stores n <= kNumLanes sums, or adds them to c.
template <class C>
void put_sums(C* c, const float* sums, int64_t n, bool add) {
  const Lanes before = add ? load_lanes(c, n) : Lanes{};
  store_lanes(c, load_lanes(sums) + before, n);
}

// Columns [begin, end), at most kBlockColumns.
template <class T, class C>
void columns(const Gemm& a, const FewRows& x, int64_t begin, int64_t end) {
  const int64_t n = a.c_MN.dim(1), width = end - begin;
  C* const c = a.c_MN.ptr<C>() + begin;
  // The rows of C are seldom in a cache, and in a few of its sets: they are fetched while the kernels compute.
  for (int64_t i = 0; i < x.num_rows; ++i) {
    for (int64_t j = 0; j < width; j += 64 / int64_t{sizeof(C)}) __builtin_prefetch(c + i * n + j, 1);
  }
  float tile[kFewRows * kBlockColumns];
  multiply_few_rows(tile, kBlockColumns, x, a.b.data.ptr<T>() + begin * x.k, width, n - end);
  for (int64_t i = 0; i < x.num_rows; ++i) {
    const float* sums = tile + i * kBlockColumns;
    int64_t j = 0;
    for (; j + kNumLanes <= width; j += kNumLanes) put_sums(c + i * n + j, sums + j, kNumLanes, a.accumulate);
    if (j < width) put_sums(c + i * n + j, sums + j, width - j, a.accumulate);
  }
}

// Calls fn for each block in [0, num_blocks). A thread takes blocks that follow each other, because it prefetches the
// next ones while it computes; a thread that has no more takes those of others.
template <class F>
void for_blocks_in_runs(ThreadPool& pool, int64_t num_blocks, F&& fn) {
  struct alignas(64) Part {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
  };
  const int64_t num_parts = std::min<int64_t>(pool.size(), num_blocks);
  const auto parts = std::make_unique<Part[]>(num_parts);
  for (int64_t i = 0; i < num_parts; ++i) {
    parts[i].next = num_blocks * i / num_parts;
    parts[i].end = num_blocks * (i + 1) / num_parts;
  }
  pool.run(num_parts, [&](int64_t own, int) {
    for (int64_t i = 0; i < num_parts; ++i) {
      Part& part = parts[(own + i) % num_parts];
      for (int64_t block; (block = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;) fn(block);
    }
  });
}

}  // namespace

bool has_few_rows(const Gemm& a) {
  return a.few_rows && a.c_MN.dim(0) <= kFewRows && a.trans_b && !a.trans_a && a.a.is_plain() && a.b.is_plain();
}

void few_rows_gemm(Stream& s, const Gemm& a) {
  const int64_t m = a.c_MN.dim(0), n = a.c_MN.dim(1), k = a.b.data.dim(1), size = size_of(a.b.data.dtype);
  const DType dtype = a.a.data.dtype;
  const FewRowsMath math = best_few_rows_math(dtype);
  const auto packed = std::make_unique_for_overwrite<CacheLine[]>(
      div_ceil(packed_bytes(dtype, m, k, math), int64_t{sizeof(CacheLine)}));
  const void* row[kFewRows];
  for (int64_t i = 0; i < m; ++i) row[i] = static_cast<const char*>(a.a.data.data) + i * k * size;
  const FewRows x = pack_few_rows(dtype, packed.get(), row, m, k, math);
  const int64_t width = math == FewRowsMath::tiles ? kTileColumns : kBlockColumns;
  for_blocks_in_runs(s.pool(), div_ceil(n, width), [&](int64_t block) {
    const int64_t begin = block * width, end = std::min(n, begin + width);
    with_float_type(dtype, [&]<class T>(T) {
      with_float_type(a.c_MN.dtype, [&]<class C>(C) { columns<T, C>(a, x, begin, end); });
    });
  });
}

}  // namespace moebius::cpu
