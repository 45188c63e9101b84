// The arguments of rope's kernels, from those of its ops.
#pragma once

#include "ops/rope/cuda/pairs.h"
#include "ops/rope/rope.h"

namespace moebius::cuda {

// The positions of heads in the forward pass: q, k and v are [rows, heads of a row, width].
template <class T>
struct Parts {
  T *q, *k, *v;
  __device__ __forceinline__ T* head(const Heads& g, int64_t t, int h) const {
    if (h < g.heads) return q + (t * g.heads + h) * g.width;
    if (h < g.heads + g.kv_heads) return k + (t * g.kv_heads + h - g.heads) * g.width;
    return v + (t * g.kv_heads + h - g.heads - g.kv_heads) * g.width;
  }
};

template <class A>
Heads heads_of(const A& a, const Tensor& q_THd, const Tensor& k_TGd) {
  return {.rows = q_THd.dim(0),
          .positions = a.cos_sin_Pd.dim(0),
          .heads = narrow<int>(q_THd.dim(1)),
          .kv_heads = narrow<int>(k_TGd.dim(1)),
          .width = narrow<int>(q_THd.dim(2)),
          .num_lanes = 1,
          .eps = a.eps,
          .pos = a.pos_T.template ptr<int32_t>(),
          .cos_sin = a.cos_sin_Pd.template ptr<float>()};
}

}  // namespace moebius::cuda
