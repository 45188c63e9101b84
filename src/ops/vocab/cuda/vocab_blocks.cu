#include "ops/vocab/vocab_blocks.h"

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/vector.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 512;

// The threads of a block call fn(column, logits from there) for the vectors of a row.
template <int kNum, class F>
__device__ __forceinline__ void each_vector(const float* row, int vocab, F&& fn) {
  for (int j = threadIdx.x * kNum; j < vocab; j += kThreads * kNum) {
    float x[kNum];
    load(x, row + j);
    fn(j, x);
  }
}

__device__ __forceinline__ bool has_row(int target, int first, int vocab) {
  return first <= target && target < first + vocab;
}

struct StatsRows {
  float* stats;
  const float* logits;
  const int32_t* target;
  int vocab, first;
};

// A block owns a row and reads it twice, the second time from a cache.
template <int kNum>
__global__ void __launch_bounds__(kThreads) stats_kernel(StatsRows a) {
  __shared__ float shared[2][32];
  const int64_t row = blockIdx.x;
  const float* logits = a.logits + row * a.vocab;
  float max = -INFINITY;
  each_vector<kNum>(logits, a.vocab, [&](int, const float(&x)[kNum]) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) max = fmaxf(max, x[i]);
  });
  max = block_max(max, shared[0]);
  const float base = max == -INFINITY ? 0.0f : max;  // if all logits are -inf, any finite number will do
  float sum = 0;
  each_vector<kNum>(logits, a.vocab, [&](int, const float(&x)[kNum]) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) sum += expf(x[i] - base);
  });
  sum = block_sum(sum, shared[1]);
  if (threadIdx.x != 0) return;
  const int target = a.target[row];
  float* stats = a.stats + 3 * row;
  stats[0] = max;
  stats[1] = sum;
  stats[2] = has_row(target, a.first, a.vocab) ? logits[target - a.first] : 0.0f;
}

template <class T>
struct BlockLossRows {
  float* loss;
  T* dlogits;  // null without gradients
  const float *logits, *stats, *weight, *scale_in_memory;
  const int32_t* target;
  int64_t rows;
  int num_blocks, vocab, first;
  float scale;
};

// The statistics of a token's logits over the whole vocabulary, merged from its blocks in order.
struct RowStats {
  float max, sum, target_logit;
};
template <class T>
__device__ __forceinline__ RowStats merged(const BlockLossRows<T>& a, int64_t row) {
  const auto stats = [&](int block) { return a.stats + 3 * (block * a.rows + row); };
  RowStats all{stats(0)[0], 0, 0};
  for (int b = 1; b < a.num_blocks; ++b) all.max = fmaxf(all.max, stats(b)[0]);
  for (int b = 0; b < a.num_blocks; ++b) {
    all.sum += stats(b)[1] * expf(stats(b)[0] - all.max);
    all.target_logit += stats(b)[2];
  }
  return all;
}

// A block owns a row.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) loss_kernel(BlockLossRows<T> a) {
  const int64_t row = blockIdx.x;
  const float weight = a.weight[row];
  const RowStats all = merged(a, row);
  if (threadIdx.x == 0) a.loss[row] = weight == 0 ? 0.0f : weight * (logf(all.sum) + (all.max - all.target_logit));
  if (!a.dlogits) return;
  const float at_target = weight * (a.scale_in_memory ? *a.scale_in_memory : a.scale), factor = at_target / all.sum;
  const int column = a.target[row] - a.first;  // outside [0, vocab) where the target is in another block
  each_vector<kNum>(a.logits + row * a.vocab, a.vocab, [&](int j, const float(&x)[kNum]) {
    float d[kNum];
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      d[i] = weight == 0 ? 0.0f : expf(x[i] - all.max) * factor;
      if (weight != 0 && j + i == column) d[i] -= at_target;
    }
    store(a.dlogits + row * a.vocab + j, d);
  });
}

template <class T>
void loss_rows(Stream& s, const LmLossBlock& a) {
  const BlockLossRows<T> rows{.loss = a.loss_C.ptr<float>(),
                              .dlogits = a.dx_CD.empty() ? nullptr : a.dlogits_CV.ptr<T>(),
                              .logits = a.logits_CV.ptr<float>(),
                              .stats = a.stats_nC3.ptr<float>(),
                              .weight = a.weight_C.ptr<float>(),
                              .scale_in_memory = a.scale_1.empty() ? nullptr : a.scale_1.ptr<float>(),
                              .target = a.target_C.ptr<int32_t>(),
                              .rows = a.x_CD.dim(0),
                              .num_blocks = narrow<int>(a.stats_nC3.dim(0)),
                              .vocab = narrow<int>(a.w_VD.dim(0)),
                              .first = narrow<int>(a.first),
                              .scale = a.scale};
  const int blocks = narrow<int>(rows.rows);
  if (rows_are_aligned(rows.vocab, 4, rows.logits) && rows_are_aligned(rows.vocab, sizeof(T), rows.dlogits))
    loss_kernel<4><<<blocks, kThreads, 0, cuda_stream(s)>>>(rows);
  else
    loss_kernel<1><<<blocks, kThreads, 0, cuda_stream(s)>>>(rows);
  check_launch("lm_loss_block");
}

}  // namespace

void lm_logits_block(Stream& s, const LmLogitsBlock& a) {
  cuda::gemm(s, {.c_MN = a.logits_CV, .a = a.x_CD, .b = a.w_VD, .trans_b = true});
  const StatsRows rows{.stats = a.stats_C3.ptr<float>(),
                       .logits = a.logits_CV.ptr<float>(),
                       .target = a.target_C.ptr<int32_t>(),
                       .vocab = narrow<int>(a.w_VD.dim(0)),
                       .first = narrow<int>(a.first)};
  const int blocks = narrow<int>(a.x_CD.dim(0));
  if (rows_are_aligned(rows.vocab, 4, rows.logits))
    stats_kernel<4><<<blocks, kThreads, 0, cuda_stream(s)>>>(rows);
  else
    stats_kernel<1><<<blocks, kThreads, 0, cuda_stream(s)>>>(rows);
  check_launch("lm_logits_block");
}

void lm_loss_block(Stream& s, const LmLossBlock& a) {
  note_odd_vocab(s, "lm_loss_block", a.x_CD.dtype, a.w_VD.dim(0));
  with_float_type(a.x_CD.dtype, [&](auto zero) { loss_rows<decltype(zero)>(s, a); });
  if (a.dx_CD.empty()) return;
  cuda::gemm(s, {.c_MN = a.dx_CD, .a = a.dlogits_CV, .b = a.w_VD});
  if (!a.dw_VD.empty())
    cuda::gemm(s, {.c_MN = a.dw_VD, .a = a.dlogits_CV, .b = a.x_CD, .trans_a = true, .accumulate = true});
}

}  // namespace moebius::cuda
