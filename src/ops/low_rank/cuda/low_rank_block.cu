// Converts one of several matrices B into a factor for all rows of its matrix.
#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Block {
  T* to;
  const T* from;
  int64_t num, L, P;  // e M Q, and dims of to and from
  uint32_t M, Q;
  int64_t column, first, count, row;
};

// A thread owns an element.
template <class T>
__global__ void __launch_bounds__(kThreads) block_kernel(Block<T> a) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.num) return;
  const int64_t r = quotient(i, a.Q), n = i - r * a.Q, e = quotient(r, a.M), m = r - e * a.M - a.first;
  const bool is_inside = m >= 0 && m < a.count;
  a.to[r * a.L + a.column + n] = is_inside ? a.from[(e * a.P + a.row + m) * a.Q + n] : T{};
}

}  // namespace

void low_rank_block(Stream& s, const LowRankBlock& a) {
  with_float_type(a.to_eML.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int rank = a.to_eML.shape.rank();
    const int64_t L = a.to_eML.dim(rank - 1), num = a.to_eML.numel() / L * a.columns.count;
    block_kernel<<<num_blocks(num, kThreads), kThreads, 0, cuda_stream(s)>>>(
        Block<T>{.to = a.to_eML.ptr<T>(),
                 .from = a.from_ePQ.ptr<T>(),
                 .num = num,
                 .L = L,
                 .P = a.from_ePQ.dim(rank - 2),
                 .M = static_cast<uint32_t>(a.to_eML.dim(rank - 2)),
                 .Q = static_cast<uint32_t>(a.columns.count),
                 .column = a.columns.first,
                 .first = a.first,
                 .count = a.count,
                 .row = a.row});
  });
  check_launch("low_rank_block");
}

}  // namespace moebius::cuda
