// Converts one of several matrices B into a factor for all rows of its matrix.
#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius::cpu {
namespace {

template <class T>
void copy_contiguous(const LowRankBlock& a) {
  const int rank = a.to_eML.shape.rank();
  const int64_t e = rank == 2 ? 1 : a.to_eML.dim(0), M = a.to_eML.dim(rank - 2), L = a.to_eML.dim(rank - 1),
                P = a.from_ePQ.dim(rank - 2), Q = a.columns.count;
  for (int64_t i = 0; i < e * M; ++i) {
    const int64_t m = i % M - a.first;
    T* to = a.to_eML.ptr<T>() + i * L + a.columns.first;
    if (m >= 0 && m < a.count)
      std::copy_n(a.from_ePQ.ptr<T>() + (i / M * P + a.row + m) * Q, Q, to);
    else
      std::fill_n(to, Q, T{});
  }
}

}  // namespace

void low_rank_block(Stream&, const LowRankBlock& a) {
  with_float_type(a.to_eML.dtype, [&]<class T>(T) { copy_contiguous<T>(a); });
}

}  // namespace moebius::cpu
