// norm_router_logits: a block owns an expert, and computes the norm itself. The weights are read before the row
// is there.
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/one_token/one_token.h"
#include "ops/one_token/one_token_backends.h"
#include "ops/one_token/sm90/norm_prologue.h"
#include "ops/routing/cuda/router_logits.h"

namespace moebius::cuda {
namespace sm90 {
namespace {

constexpr int kVec = 8;                    // elements of a row that a thread holds
constexpr int64_t kMaxLogitsWidth = 8192;  // of the row in shared memory

template <class W>
struct Params {
  float* logits;
  const W* w;
  const float* bias;  // null: none
  NormRowsFwd<bf16> norm;
  int lanes;
};

// Sums and products are those of ops/routing/cuda/router_logits_few.cu.
template <class W>
__global__ void __launch_bounds__(kStreamMultiplying) norm_logits_kernel(Params<W> p) {
  __shared__ float sums[kStreamWarps], norm_sums[kStreamWarps];
  extern __shared__ __align__(16) uint4 x[];
  let_next_start();
  const auto width = static_cast<int>(p.norm.width), first = static_cast<int>(threadIdx.x) * kVec;
  const W* w = p.w + int64_t{blockIdx.x} * width;
  const auto first_w = fetch<kVec>(w + first, first < width);
  for (int c = first + kStreamMultiplying * kVec; c < width; c += kStreamMultiplying * kVec) prefetch_line(w + c);
  const NormPrologue norm(p.norm, p.lanes);
  wait_for_inputs();
  norm.run(x, norm_sums, blockIdx.x == 0);
  float sum = 0;
  for (int c = first; c < width; c += kStreamMultiplying * kVec) {
    float row[kVec], weight[kVec];
    unpack<bf16>(row, Raw<bf16, kVec>{{x[c / kVec]}});
    unpack<W>(weight, c == first ? first_w : fetch<kVec>(w + c));
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum = __fmaf_rn(row[j], weight[j], sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < kStreamWarps; ++warp) total += sums[warp];
  p.logits[blockIdx.x] = p.bias ? total + p.bias[blockIdx.x] : total;
}

bool takes_logits(const NormRouterLogits& a) {
  const int64_t width = a.norm.x_TD.dim(1);
  return width % kVec == 0 && width <= kMaxLogitsWidth && is_aligned(a.logits.w_ED) && takes_prologue(a.norm);
}

template <class W>
void launch(Stream& s, const NormRouterLogits& a) {
  const int64_t width = a.norm.x_TD.dim(1);
  const Params<W> p{.logits = a.logits.logits_TE.ptr<float>(),
                    .w = a.logits.w_ED.ptr<W>(),
                    .bias = bias_of(a.logits),
                    .norm = norm_args(a.norm),
                    .lanes = norm_lanes(width)};
  const LaunchShape how{.blocks = static_cast<unsigned>(a.logits.w_ED.dim(0)),
                        .threads = kStreamMultiplying,
                        .shared_bytes = static_cast<size_t>(width * 2)};
  launch_kernel(s, true, how, norm_logits_kernel<W>, p);
  check_launch("norm_router_logits");
}

}  // namespace
}  // namespace sm90

bool takes(const Stream& s, const NormRouterLogits& a) { return uses_hopper_kernels(s) && sm90::takes_logits(a); }

void norm_router_logits(Stream& s, const NormRouterLogits& a) {
  a.logits.w_ED.dtype == DType::f32 ? sm90::launch<float>(s, a) : sm90::launch<bf16>(s, a);
}

}  // namespace moebius::cuda
