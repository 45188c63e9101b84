// The backward pass of attention with mma.sync, in three kernels: sums of each row, dk and dv, and dq. The order of
// every sum is fixed, without atomics. dk and dv need all queries of some keys, and dq all keys of some queries, so
// both compute the scores.
#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/sm80/launch.h"

namespace moebius::cuda::sm80 {

// Per row and head, with heads first: log2 e times lse, and <do, o>.
struct RowSums {
  float *lse2, *delta;  // [batch, heads, rows]
};

struct BwdParams {
  Operand q, k, v, dout;
  Result dq, dk, dv;
  RowSums sums;
  AttentionSizes z;
};

void launch_dq(Stream& s, const AttentionBwd& a, const BwdParams& p);
void launch_dkv(Stream& s, const AttentionBwd& a, const BwdParams& p);

}  // namespace moebius::cuda::sm80
