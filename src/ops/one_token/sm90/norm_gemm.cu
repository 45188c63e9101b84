// norm_gemm: each block computes the norm while its weights arrive, which are on their way before the row is there.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/experts/sm80/operands.h"
#include "ops/one_token/one_token.h"
#include "ops/one_token/one_token_backends.h"
#include "ops/one_token/sm90/norm_prologue.h"

namespace moebius::cuda {
namespace sm90 {
namespace {

constexpr int kSteps = 2, kStages = 4;  // a ring holds 2048 of k, all of a row of common widths
constexpr int kBlocksTogether = 3;
constexpr int kMaxSharedK = 4096;
using GemmRing = WeightRing<kSteps, kStages>;
constexpr int kMaxShared = GemmRing::kBytes + kMaxSharedK * 2;

struct Params {
  const char* w;
  bf16* c;
  sm80::ColumnBias bias;
  NormRowsFwd<bf16> norm;
  int32_t lanes, N, K;
};

__global__ void __launch_bounds__(kStreamThreads, kBlocksTogether) norm_gemm_kernel(Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ GemmRing ring;
  __shared__ float of_warps[2][kStreamWarps][kStreamRows], norm_sums[kStreamWarps];
  auto* const x = reinterpret_cast<uint4*>(stages + GemmRing::kBytes);
  if (threadIdx.x == 0) ring.init();
  let_next_start();
  __syncthreads();
  const int32_t tiles = p.N / kStreamRows;
  const auto first = static_cast<int32_t>(blockIdx.x), stride = static_cast<int32_t>(gridDim.x);
  if (threadIdx.x >= kStreamMultiplying) {
    WeightCopies<kSteps, kStages> copies(stages, ring);
    const int row = static_cast<int>(threadIdx.x % kStreamRows);
    for (int32_t tile = first; tile < tiles; tile += stride)
      copies.copy_tile(p.w + int64_t{tile * kStreamRows + row} * p.K * 2, p.K);
    return;
  }
  const NormPrologue norm(p.norm, p.lanes);
  wait_for_inputs();
  norm.run(x, norm_sums, blockIdx.x == 0);
  WeightProducts<kSteps, kStages> products(stages, ring);
  int turn = 0;
  for (int32_t tile = first; tile < tiles; tile += stride, turn ^= 1) {
    products.multiply_tile(of_warps[turn][threadIdx.x / 32], smem_addr(x), p.K);
    named_barrier_sync(kMultiplyingBarrier, kStreamMultiplying);
    // Meanwhile the other warps go on to the other sums, and to the next barrier at most.
    if (threadIdx.x < kStreamRows) {
      const auto row = static_cast<int>(threadIdx.x), column = tile * kStreamRows + row;
      set(p.c[column], sum_of_warps(of_warps[turn], row, p.bias.b ? p.bias.at(0, column) : 0.0f));
    }
    __syncwarp();
  }
}

bool takes_gemm(const NormGemm& a) {
  const int64_t N = a.w_ND.dim(0), K = a.w_ND.dim(1);
  if (a.w_ND.dtype != DType::bf16 || a.c_TN.dtype != DType::bf16 || N % kStreamRows != 0 || K % 8 != 0) return false;
  if (!a.bias_N.empty() && a.bias_N.dtype != DType::bf16) return false;
  const bool has_other_sums = N <= 4096 && K >= 4096;  // of sixteen warps (ops/experts/sm90/few_rows.cu)
  return K <= kMaxSharedK && !has_other_sums && N * K / 8 < INT32_MAX && rows_are_aligned(K, 2, a.w_ND.data) &&
         takes_prologue(a.norm);
}

void run_gemm(Stream& s, const NormGemm& a) {
  const int64_t N = a.w_ND.dim(0), K = a.w_ND.dim(1);
  const Params p{.w = static_cast<const char*>(a.w_ND.data),
                 .c = a.c_TN.ptr<bf16>(),
                 .bias = a.bias_N.empty() ? sm80::ColumnBias{} : sm80::column_bias(a.bias_N.view({1, N}), 0),
                 .norm = norm_args(a.norm),
                 .lanes = norm_lanes(K),
                 .N = narrow<int32_t>(N),
                 .K = narrow<int32_t>(K)};
  const int64_t blocks =
      std::min<int64_t>(N / kStreamRows, kBlocksTogether * int64_t{gpu_limits(s).num_multiprocessors});
  const auto shared = GemmRing::kBytes + narrow<int>(K * 2);
  MOEBIUS_CUDA(cudaFuncSetAttribute(norm_gemm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared));
  const LaunchShape how{
      .blocks = static_cast<unsigned>(blocks), .threads = kStreamThreads, .shared_bytes = static_cast<size_t>(shared)};
  launch_kernel(s, true, how, norm_gemm_kernel, p);
  check_launch("norm_gemm");
}

}  // namespace
}  // namespace sm90

bool takes(const Stream& s, const NormGemm& a) { return uses_hopper_kernels(s) && sm90::takes_gemm(a); }

void norm_gemm(Stream& s, const NormGemm& a) { sm90::run_gemm(s, a); }

}  // namespace moebius::cuda
