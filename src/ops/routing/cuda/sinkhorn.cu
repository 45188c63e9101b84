// The fixed point of cpu/sinkhorn.cc in the CPU's order of sums, so that both choose the same experts. A CUDA graph
// cannot branch on a result, so all iterations are launched, and those after convergence do nothing.
#include "device/cuda/cuda.h"
#include "ops/routing/cuda/routing.h"
#include "ops/routing/cuda/scores.h"

namespace moebius::cuda {
namespace {

constexpr int kMaxIterations = 100, kMaxExperts = 1024, kRowThreads = 256;
constexpr float kTolerance = 1e-4f, kEps = 1e-8f;

struct Fixed {
  const float* logits_TE;
  RouteScratch scratch;
  int num_tokens, num_experts;
  float rows_share, columns_share;  // 1/T, 1/E
};

// A warp owns a token. cost = exp(logits - max); block 0 also sets d1 = 1.
__global__ void __launch_bounds__(kRowThreads) exp_rows_kernel(Fixed a) {
  const int lane = threadIdx.x % kWarpSize, E = a.num_experts;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < E; i += kRowThreads) a.scratch.column_scale_E[i] = 1.0f;
    if (threadIdx.x == 0) *a.scratch.moved_1 = kTolerance + 1;
  }
  const int64_t t = static_cast<int64_t>(blockIdx.x) * (kRowThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (t >= a.num_tokens) return;
  float max = -INFINITY;
  for (int i = lane; i < E; i += kWarpSize) max = fmaxf(max, a.logits_TE[t * E + i]);
  max = warp_max(max);
  for (int i = lane; i < E; i += kWarpSize)
    a.scratch.cost_TE[t * E + i] = exp_f32(__fsub_rn(a.logits_TE[t * E + i], max));
}

// A block owns kTokensPerPartial tokens: a thread makes d0 of one of them, then sums the columns of
// some experts.
__global__ void __launch_bounds__(kTokensPerPartial) sum_columns_kernel(Fixed a) {
  __shared__ float d0[kTokensPerPartial];
  if (!(*a.scratch.moved_1 > kTolerance)) return;
  const int E = a.num_experts;
  const int64_t first = blockIdx.x * kTokensPerPartial;
  const int num = static_cast<int>(min(kTokensPerPartial, a.num_tokens - first));
  const float* cost = a.scratch.cost_TE + first * E;
  if (threadIdx.x < num) {
    float sum = 0;
    for (int i = 0; i < E; ++i)
      sum = __fmaf_rn(a.scratch.column_scale_E[i], cost[static_cast<int64_t>(threadIdx.x) * E + i], sum);
    d0[threadIdx.x] = __fdiv_rn(a.rows_share, __fadd_rn(sum, kEps));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < E; i += kTokensPerPartial) {
    float sum = 0;
    for (int j = 0; j < num; ++j) sum = __fmaf_rn(d0[j], cost[static_cast<int64_t>(j) * E + i], sum);
    a.scratch.partial_PE[static_cast<int64_t>(blockIdx.x) * E + i] = sum;
  }
}

// One block computes it: each thread d1 of an expert; the first thread adds up the changes.
__global__ void __launch_bounds__(kMaxExperts) update_columns_kernel(Fixed a, int num_partials) {
  __shared__ float moved[kMaxExperts];
  if (!(*a.scratch.moved_1 > kTolerance)) return;
  const int i = threadIdx.x, E = a.num_experts;
  if (i < E) {
    float sum = 0;
    for (int p = 0; p < num_partials; ++p) sum = __fadd_rn(sum, a.scratch.partial_PE[static_cast<int64_t>(p) * E + i]);
    const float next = __fdiv_rn(a.columns_share, __fadd_rn(sum, kEps));
    moved[i] = fabsf(__fsub_rn(next, a.scratch.column_scale_E[i]));
    a.scratch.column_scale_E[i] = next;
  }
  __syncthreads();
  if (i != 0) return;
  float sum = 0;
  for (int j = 0; j < E; ++j) sum = __fadd_rn(sum, moved[j]);
  *a.scratch.moved_1 = __fdiv_rn(sum, static_cast<float>(E));
}

}  // namespace

void sinkhorn(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1);
  const Fixed args{.logits_TE = a.logits_TE.ptr<float>(),
                   .scratch = scratch,
                   .num_tokens = static_cast<int>(T),
                   .num_experts = static_cast<int>(E),
                   .rows_share = 1.0f / static_cast<float>(T),
                   .columns_share = 1.0f / static_cast<float>(E)};
  const auto partials = static_cast<unsigned>(div_ceil(T, kTokensPerPartial));
  const auto row_blocks = static_cast<unsigned>(div_ceil(T, kRowThreads / kWarpSize));
  const cudaStream_t stream = cuda_stream(s);
  exp_rows_kernel<<<row_blocks, kRowThreads, 0, stream>>>(args);
  check_launch("route_fwd");
  for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
    sum_columns_kernel<<<partials, kTokensPerPartial, 0, stream>>>(args);
    check_launch("route_fwd");
    update_columns_kernel<<<1, kMaxExperts, 0, stream>>>(args, static_cast<int>(partials));
    check_launch("route_fwd");
  }
}

}  // namespace moebius::cuda
