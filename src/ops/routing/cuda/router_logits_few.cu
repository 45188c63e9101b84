// The logits of few rows, as when text is generated: a block owns an expert, and reads its weights once, before the
// rows are there. Products and sums are in f32. A logit does not depend on the other rows.
#include "device/cuda/cuda.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/routing/cuda/router_logits.h"
#include "ops/routing/router_logits_few_backends.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVec = 8;         // elements of a row that a thread holds
constexpr int kRowsAtOnce = 8;  // rows whose loads are on their way at once

template <class X, class W>
struct Args {
  float* logits;
  const X* x;
  const W* w;
  const float* bias;  // null: none
  int num_rows, num_experts, width;
};

template <class X, class W>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(Args<X, W> a) {
  __shared__ float sums[kEarlyRows][kWarps];
  let_next_start();
  const W* w = a.w + int64_t{blockIdx.x} * a.width;
  const int first = static_cast<int>(threadIdx.x) * kVec;
  const auto first_w = fetch<kVec>(w + first, first < a.width);
  for (int c = first + kThreads * kVec; c < a.width; c += kThreads * kVec) prefetch_line(w + c);
  wait_for_inputs();
  for (int t0 = 0; t0 < a.num_rows; t0 += kRowsAtOnce) {
    float sum[kRowsAtOnce] = {};
    for (int c = first; c < a.width; c += kThreads * kVec) {
      Raw<X, kVec> x[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i)
        x[i] = fetch<kVec>(a.x + int64_t{t0 + i} * a.width + c, t0 + i < a.num_rows);
      float weight[kVec];
      unpack<W>(weight, c == first ? first_w : fetch<kVec>(w + c));
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        float row[kVec];
        unpack<X>(row, x[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[i] = __fmaf_rn(row[j], weight[j], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const float of_warp = warp_sum(sum[i]);
      if (threadIdx.x % 32 == 0 && t0 + i < a.num_rows) sums[t0 + i][threadIdx.x / 32] = of_warp;
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t < a.num_rows; t += kThreads) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[t][warp];
    a.logits[int64_t{t} * a.num_experts + blockIdx.x] = a.bias ? sum + a.bias[blockIdx.x] : sum;
  }
}

bool takes(const RouterLogitsFwd& a) {
  return a.x_TD.dim(0) <= kEarlyRows && a.x_TD.dim(1) % kVec == 0 && is_aligned(a.x_TD) && is_aligned(a.w_ED);
}

}  // namespace

void router_logits_few(Stream& s, const RouterLogitsFwd& a) {
  if (!takes(a)) return cuda::router_logits_fwd(s, a);
  const auto run = [&]<class X, class W>(X, W) {
    const Args<X, W> args{.logits = a.logits_TE.ptr<float>(),
                          .x = a.x_TD.ptr<X>(),
                          .w = a.w_ED.ptr<W>(),
                          .bias = bias_of(a),
                          .num_rows = narrow<int>(a.x_TD.dim(0)),
                          .num_experts = narrow<int>(a.w_ED.dim(0)),
                          .width = narrow<int>(a.x_TD.dim(1))};
    const LaunchShape how{.blocks = static_cast<unsigned>(args.num_experts), .threads = kThreads};
    launch_kernel(s, true, how, few_rows_kernel<X, W>, args);
  };
  if (a.x_TD.dtype == DType::f32) return run(float{}, float{});
  if (a.w_ED.dtype == DType::f32) return run(bf16{}, float{});
  run(bf16{}, bf16{});
}

}  // namespace moebius::cuda
