#include <cooperative_groups.h>

#include <algorithm>

#include "core/cuda.h"
#include "ops/backends.h"
#include "ops/cuda/vector.h"
#include "ops/gemm/gemm.h"
#include "ops/vocab/vocab.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksOfRow = 8;  // a cluster

template <class T>
struct Rows {
  float* loss;
  T* dlogits;                                      // null without gradients
  const float *logits, *weight, *scale_in_memory;  // the last one may be null
  const int32_t* target;
  int vocab;
  float scale;
};

// What a block knows of its part of a row: the largest logit, and the sum of e^(logit - max).
struct Part {
  float max, sum;
};

// The vectors of a row that a thread has, every kThreads * kBlocksOfRow-th: held in registers, kVectors of them, or
// read again when asked for (kVectors 0), for rows longer than registers hold.
template <int kNum, int kVectors>
class Logits {
 public:
  __device__ __forceinline__ Logits(const float* row, int vocab, int block) : row_(row), vocab_(vocab) {
    first_ = (block * kThreads + static_cast<int>(threadIdx.x)) * kNum;
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column(v) < vocab) load(x_[v], row + column(v));
      }
    }
  }
  // fn(column, logits of the vector)
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
  __device__ __forceinline__ int column(int v) const { return first_ + v * (kThreads * kBlocksOfRow * kNum); }
  const float* row_;
  int vocab_, first_;
  float x_[kVectors > 0 ? kVectors : 1][kNum];
};

// Zeros, and loss 0.
template <int kNum, class T>
__device__ void skip_row(const Rows<T>& a, int64_t row, int block) {
  if (block == 0 && threadIdx.x == 0) a.loss[row] = 0;
  if (!a.dlogits) return;
  const float zeros[kNum] = {};
  for (int j = (block * kThreads + static_cast<int>(threadIdx.x)) * kNum; j < a.vocab;
       j += kThreads * kBlocksOfRow * kNum) {
    store(a.dlogits + row * a.vocab + j, zeros);
  }
}

// A cluster owns a row of logits and reads it once; its blocks tell each other their Part.
template <int kNum, int kVectors, class T>
__global__ void __cluster_dims__(kBlocksOfRow, 1, 1) __launch_bounds__(kThreads, kNum* kVectors <= 40 ? 2 : 1)
    loss_rows_kernel(Rows<T> a) {
  __shared__ float shared[2][32];
  __shared__ Part part;
  const auto cluster = cooperative_groups::this_cluster();
  const int block = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x / kBlocksOfRow;
  const float weight = a.weight[row];
  if (weight == 0) return skip_row<kNum>(a, row, block);
  Logits<kNum, kVectors> logits(a.logits + row * a.vocab, a.vocab, block);

  float max = -INFINITY;
  logits.each([&](int, float(&x)[kNum]) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) max = fmaxf(max, x[i]);
  });
  max = block_max(max, shared[0]);
  // A block without a logit above -inf: any finite number serves.
  const float base = max == -INFINITY ? 0.0f : max;
  float sum = 0;
  logits.each([&](int, float(&x)[kNum]) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      const float e = expf(x[i] - base);
      if constexpr (kVectors > 0) x[i] = e;
      sum += e;
    }
  });
  sum = block_sum(sum, shared[1]);
  if (threadIdx.x == 0) part = {base, sum};
  cluster.sync();
  Part parts[kBlocksOfRow];
#pragma unroll
  for (int i = 0; i < kBlocksOfRow; ++i) parts[i] = *cluster.map_shared_rank(&part, i);
  // No block ends while another still reads its part.
  auto token = cluster.barrier_arrive();
  Part all{-INFINITY, 0};
#pragma unroll
  for (int i = 0; i < kBlocksOfRow; ++i) all.max = parts[i].sum == 0 ? all.max : fmaxf(all.max, parts[i].max);
#pragma unroll
  for (int i = 0; i < kBlocksOfRow; ++i) {
    if (parts[i].sum != 0) all.sum += parts[i].sum * expf(parts[i].max - all.max);
  }

  const float scale = a.scale_in_memory ? *a.scale_in_memory : a.scale;
  const int target = a.target[row];
  require(0 <= target && target < a.vocab);
  if (block == 0 && threadIdx.x == 0)
    a.loss[row] = weight * (logf(all.sum) + (all.max - a.logits[row * a.vocab + target]));
  if (a.dlogits) {
    const float factor = scale * weight / all.sum * expf(base - all.max);
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
  cluster.barrier_wait(std::move(token));
}

template <class T>
void loss_rows(Stream& s, const Rows<T>& a, int64_t rows) {
  constexpr int kSpan = kThreads * kBlocksOfRow;  // vectors of a row that threads have one each of
  const int blocks = narrow<int>(rows * kBlocksOfRow);
  const bool aligned =
      a.vocab % 4 == 0 && rows_are_aligned(a.vocab, 4, a.logits) && reinterpret_cast<uintptr_t>(a.dlogits) % 16 == 0;
  const cudaStream_t stream = cuda_stream(s);
  if (!aligned && a.vocab <= kSpan * 16)
    loss_rows_kernel<1, 16><<<blocks, kThreads, 0, stream>>>(a);
  else if (!aligned)
    loss_rows_kernel<1, 0><<<blocks, kThreads, 0, stream>>>(a);
  else if (a.vocab <= kSpan * 4 * 4)
    loss_rows_kernel<4, 4><<<blocks, kThreads, 0, stream>>>(a);
  else if (a.vocab <= kSpan * 4 * 10)
    loss_rows_kernel<4, 10><<<blocks, kThreads, 0, stream>>>(a);
  else if (a.vocab <= kSpan * 4 * 16)
    loss_rows_kernel<4, 16><<<blocks, kThreads, 0, stream>>>(a);
  else
    loss_rows_kernel<4, 0><<<blocks, kThreads, 0, stream>>>(a);
  check_launch("lm_loss");
}

}  // namespace

void lm_loss(Stream& s, const LmLoss& a) {
  const int64_t tokens = a.x_TD.dim(0), chunk = a.logits_CV.dim(0);
  const bool grads = !a.dx_TD.empty();
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t end = std::min(tokens, begin + chunk);
    const Tensor x = a.x_TD.rows(begin, end), logits = a.logits_CV.rows(0, end - begin);
    cuda::gemm(s, {.c_MN = logits, .a = x, .b = a.w_VD, .trans_b = true});
    with_float_type(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      loss_rows<T>(s,
                   {.loss = a.loss_T.ptr<float>() + begin,
                    .dlogits = grads ? a.dlogits_CV.ptr<T>() : nullptr,
                    .logits = logits.ptr<float>(),
                    .weight = a.weight_T.ptr<float>() + begin,
                    .scale_in_memory = a.scale_1.empty() ? nullptr : a.scale_1.ptr<float>(),
                    .target = a.target_T.ptr<int32_t>() + begin,
                    .vocab = narrow<int>(a.w_VD.dim(0)),
                    .scale = a.scale},
                   end - begin);
    });
    if (!grads) continue;
    const Tensor dlogits = a.dlogits_CV.rows(0, end - begin);
    cuda::gemm(s, {.c_MN = a.dx_TD.rows(begin, end), .a = dlogits, .b = a.w_VD});
    cuda::gemm(s, {.c_MN = a.dw_VD, .a = dlogits, .b = x, .trans_a = true, .accumulate = true});
  }
}

}  // namespace moebius::cuda
