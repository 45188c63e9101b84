// The loss of one row of logits, and the derivative w.r.t. them, computed by the blocks of a team.
#pragma once

#include "ops/cuda/vector.h"
#include "ops/vocab/cuda/loss_rows.h"

namespace moebius::cuda {

constexpr int kLossThreads = 512;  // threads of a block

// The place of a block among those of its row.
struct Team {
  int block, num_blocks;
  __device__ __forceinline__ int first_vector() const { return block * kLossThreads + static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int stride() const { return num_blocks * kLossThreads; }
};

// The vectors of a row that a thread has, one a stride: held in registers, kVectors of them, or
// read again on demand (kVectors 0), for rows that do not fit in registers.
template <int kNum, int kVectors>
class Logits {
 public:
  __device__ __forceinline__ Logits(const float* row, int vocab, Team team)
      : row_(row), vocab_(vocab), first_(team.first_vector() * kNum), stride_(team.stride() * kNum) {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) unpack<float>(x_[v], fetch<kNum>(row + column(v), column(v) < vocab));
    }
  }
  // Calls fn(column, logits of the vector).
  template <class F>
  __device__ __forceinline__ void each(F&& fn) {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column(v) < vocab_) fn(column(v), x_[v]);
      }
    } else {
      for (int v = 0; column(v) < vocab_; ++v) {
        float x[kNum];
        load(x, row_ + column(v));
        fn(column(v), x);
      }
    }
  }

 private:
  __device__ __forceinline__ int column(int v) const { return first_ + v * stride_; }
  const float* row_;
  int vocab_, first_, stride_;
  float x_[kVectors > 0 ? kVectors : 1][kNum];
};

// Writes zeros, and a loss of 0.
template <int kNum, class T>
__device__ __forceinline__ void skip_row(const LossRows<T>& a, int64_t row, Team team) {
  if (team.block == 0 && threadIdx.x == 0) a.loss[row] = 0;
  if (!a.dlogits) return;
  const float zeros[kNum] = {};
  for (int j = team.first_vector() * kNum; j < a.vocab; j += team.stride() * kNum) {
    store(a.dlogits + row * a.vocab + j, zeros);
  }
}

// Computes the loss of a row whose weight is not 0. Each block has read its part of the row once where
// kVectors hold it.
// add_up(part) gives the part of the whole team from that of this block.
template <int kNum, int kVectors, class T, class AddUp>
__device__ __forceinline__ void loss_of_row(const LossRows<T>& a, int64_t row, Team team, AddUp add_up) {
  __shared__ float shared[2][32];
  const float weight = a.weight[row];
  Logits<kNum, kVectors> logits(a.logits + row * a.vocab, a.vocab, team);

  // A thread keeps its largest logit. Where logits are read again it also keeps the sum of e^(logit - largest),
  // which is rescaled when a larger one is found.
  float largest = -INFINITY, sum = 0;
  logits.each([&](int, float(&x)[kNum]) {
    float larger = largest;
#pragma unroll
    for (int i = 0; i < kNum; ++i) larger = fmaxf(larger, x[i]);
    if (kVectors == 0 && larger != -INFINITY) {
      if (larger > largest) sum *= expf(largest - larger);
#pragma unroll
      for (int i = 0; i < kNum; ++i) sum += expf(x[i] - larger);
    }
    largest = larger;
  });
  const float max = block_max(largest, shared[0]);
  // A block without a logit above -inf: any finite number serves.
  const float base = max == -INFINITY ? 0.0f : max;
  if constexpr (kVectors > 0) {
    logits.each([&](int, float(&x)[kNum]) {
#pragma unroll
      for (int i = 0; i < kNum; ++i) sum += x[i] = expf(x[i] - base);
    });
  } else {
    sum *= expf(largest - base);  // 0 where the thread has no logit above -inf
  }
  sum = block_sum(sum, shared[1]);
  const LossPart all = add_up(LossPart{base, sum});
  const float row_max = all.max, row_sum = all.sum;

  const float scale = a.scale_in_memory ? *a.scale_in_memory : a.scale;
  const int target = a.target[row];
  require(0 <= target && target < a.vocab);
  if (team.block == 0 && threadIdx.x == 0)
    a.loss[row] = weight * (logf(row_sum) + (row_max - a.logits[row * a.vocab + target]));
  if (a.dlogits) {
    const float factor = scale * weight / row_sum * expf(base - row_max);
    logits.each([&](int column, float(&x)[kNum]) {
      float d[kNum];
#pragma unroll
      for (int i = 0; i < kNum; ++i) {
        d[i] = (kVectors > 0 ? x[i] : expf(x[i] - base)) * factor;
        if (column + i == target) d[i] -= scale * weight;
      }
      store(a.dlogits + row * a.vocab + column, d);
    });
  }
}

}  // namespace moebius::cuda
