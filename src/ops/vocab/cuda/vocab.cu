#include <cooperative_groups.h>

#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/sm90/sync.h"
#include "ops/vocab/cuda/loss_rows.h"
#include "ops/vocab/vocab.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxBlocksOfRow = 8;  // that a cluster may have everywhere

// The place of a block among those of its row.
struct Team {
  int block, num_blocks;
  __device__ __forceinline__ int first_vector() const { return block * kThreads + static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int stride() const { return num_blocks * kThreads; }
};

// The vectors of a row that a thread has, one a stride: held in registers, kVectors of them, or
// read again when asked for (kVectors 0), for rows longer than registers hold.
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
  __device__ __forceinline__ int column(int v) const { return first_ + v * stride_; }
  const float* row_;
  int vocab_, first_, stride_;
  float x_[kVectors > 0 ? kVectors : 1][kNum];
};

// Zeros, and loss 0.
template <int kNum, class T>
__device__ void skip_row(const LossRows<T>& a, int64_t row, Team team) {
  if (team.block == 0 && threadIdx.x == 0) a.loss[row] = 0;
  if (!a.dlogits) return;
  const float zeros[kNum] = {};
  for (int j = team.first_vector() * kNum; j < a.vocab; j += team.stride() * kNum) {
    store(a.dlogits + row * a.vocab + j, zeros);
  }
}

template <bool kClusters>
__device__ __forceinline__ Team team_of_block() {
  if constexpr (kClusters) {
    const auto cluster = cooperative_groups::this_cluster();
    return {static_cast<int>(cluster.block_rank()), static_cast<int>(cluster.num_blocks())};
  }
  return {0, 1};
}

// Adds up the parts of the blocks of a cluster. It arrives at the cluster's barrier, at which a block
// waits before it ends.
__device__ __forceinline__ LossPart part_of_cluster(const LossPart& mine) {
  __shared__ LossPart part;
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) part = mine;
  cluster.sync();
  // Each warp adds the parts up, one lane a block.
  const int lane = threadIdx.x % 32;
  const LossPart other = lane < static_cast<int>(cluster.num_blocks()) ? *cluster.map_shared_rank(&part, lane)
                                                                         : LossPart{0, 0};
  const float row_max = warp_max(other.sum == 0 ? -INFINITY : other.max);
  const float row_sum = warp_sum(other.sum == 0 ? 0.0f : other.sum * expf(other.max - row_max));
  // No block ends while another still reads its part: the sum, which needs it, is there before the
  // arrival. Nothing was written that others wait for, so the arrival is relaxed.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::"f"(row_sum) : "memory");
  return {row_max, row_sum};
}

// A cluster owns a row of logits and reads it once; its blocks tell each other their part. Without
// kClusters, which only Hopper and later GPUs have, a block owns a row.
template <int kNum, int kVectors, bool kClusters, class T>
__global__ void __launch_bounds__(kThreads, 1) loss_rows_kernel(LossRows<T> a) {
  __shared__ float shared[2][32];
  const Team team = team_of_block<kClusters>();
  const int64_t row = blockIdx.x / team.num_blocks;
  const float weight = a.weight[row];
  if (weight == 0) return skip_row<kNum>(a, row, team);
  Logits<kNum, kVectors> logits(a.logits + row * a.vocab, a.vocab, team);

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
  const LossPart all = kClusters ? part_of_cluster({base, sum}) : LossPart{base, sum};
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
  if constexpr (kClusters) cluster_wait();
}

template <int kNum, int kVectors, class T>
void launch(Stream& s, const LossRows<T>& a, int64_t rows, int64_t blocks_of_row) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks_of_row), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(narrow<int>(rows * blocks_of_row));
  config.blockDim = dim3(kThreads);
  config.stream = cuda_stream(s);
  config.attrs = &cluster;
  config.numAttrs = 1;
  MOEBIUS_CUDA(cudaLaunchKernelEx(&config, loss_rows_kernel<kNum, kVectors, true, T>, a));
}

template <int kNum, class T>
void launch_blocks(Stream& s, const LossRows<T>& a, int64_t rows) {
  note_no_portable_kernel(s, "lm_loss");
  loss_rows_kernel<kNum, 0, false, T><<<narrow<int>(rows), kThreads, 0, cuda_stream(s)>>>(a);
  check_launch("lm_loss");
}

// Chooses the fewest blocks, and the fewest registers, that hold a row.
template <class T>
void loss_rows(Stream& s, const LossRows<T>& a, int64_t rows) {
  const bool aligned =
      rows_are_aligned(a.vocab, 4, a.logits) && reinterpret_cast<uintptr_t>(a.dlogits) % (4 * sizeof(T)) == 0;
  if (!uses_hopper_kernels(s)) return aligned ? launch_blocks<4>(s, a, rows) : launch_blocks<1>(s, a, rows);
  if (aligned && prefetched_loss_rows(s, a, rows)) return;
  const auto blocks = [&](int per_thread) { return div_ceil(a.vocab, kThreads * per_thread); };
  if (!aligned) {
    if (blocks(16) <= kMaxBlocksOfRow) return launch<1, 16>(s, a, rows, blocks(16));
    return launch<1, 0>(s, a, rows, kMaxBlocksOfRow);
  }
  if (blocks(64) <= kMaxBlocksOfRow) return launch<4, 16>(s, a, rows, blocks(64));
  launch<4, 0>(s, a, rows, kMaxBlocksOfRow);
}

}  // namespace

void lm_loss(Stream& s, const LmLoss& a) {
  note_odd_vocab(s, "lm_loss", a.x_TD.dtype, a.w_VD.dim(0));
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
    if (!a.dw_VD.empty()) cuda::gemm(s, {.c_MN = a.dw_VD, .a = dlogits, .b = x, .trans_a = true, .accumulate = true});
  }
}

}  // namespace moebius::cuda
