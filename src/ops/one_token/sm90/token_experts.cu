// The experts of one token in two kernels. Blocks choose the experts themselves. The first kernel lets the second start
// when the logits are there, so that this one chooses too, and has its first weights, when the first one ends.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/experts/sm80/gated_words.h"
#include "ops/experts/sm80/operands.h"
#include "ops/one_token/one_token.h"
#include "ops/one_token/one_token_backends.h"
#include "ops/one_token/sm90/choose_experts.h"
#include "ops/one_token/sm90/weight_stream.h"

namespace moebius::cuda {
namespace sm90 {
namespace {

using sm80::ColumnBias;
using sm80::WordActivation;

constexpr int kHalf = kStreamRows / 2;  // gate rows of a tile, and the up rows of the same columns
constexpr int kUpSteps = 2, kUpStages = 3, kUpBlocks = 3;
constexpr int kDownBytes = 200 << 10;   // of the ring of the second kernel, at most
constexpr int kMaxRowBytes = 14 << 10;  // of x, and of all activations, in shared memory
using UpRing = WeightRing<kUpSteps, kUpStages>;

struct UpParams {
  const char *w, *x;
  uint16_t* a;
  ColumnBias bias;
  WordActivation activation;
  Choose choice;
  int32_t F, K;
};

struct alignas(16) UpShared {
  float of_warps[2][kStreamWarps][kStreamRows];
  float sums[kStreamRows];
  UpRing ring;
  ChoiceRow choice;
};

// Computes the activations of a tile from the sums of the warps. One warp calls it.
__device__ __forceinline__ void activate_tile(const UpParams& p, UpShared& shared, int turn, int k, int32_t first) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < kStreamRows) {
    const int32_t column = lane < kHalf ? first + lane : p.F + first + lane - kHalf;
    const float bias = p.bias.b ? p.bias.at(shared.choice.chosen_K[k], column) : 0.0f;
    shared.sums[lane] = sum_of_warps(shared.of_warps[turn], lane, bias);
  }
  __syncwarp();
  if (lane == 0) {
    uint32_t gate[4], up[4], a[4];
    float x_gate[kHalf], x_up[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      x_gate[j] = shared.sums[j];
      x_up[j] = shared.sums[kHalf + j];
    }
    sm80::pack(gate, x_gate);
    sm80::pack(up, x_up);
    sm80::activate(a, p.activation, gate, up);
    *reinterpret_cast<uint4*>(p.a + int64_t{k} * p.F + first) = make_uint4(a[0], a[1], a[2], a[3]);
  }
  __syncwarp();
}

template <int kExperts>
__global__ void __launch_bounds__(kStreamThreads, kUpBlocks) token_up_kernel(UpParams p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ UpShared shared;
  auto* const x = reinterpret_cast<uint4*>(stages + UpRing::kBytes);
  if (threadIdx.x == 0) shared.ring.init();
  __syncthreads();
  wait_for_inputs();
  let_next_start();
  const int32_t tiles = p.F / kHalf, items = tiles * p.choice.top_k;
  const auto first_item = static_cast<int32_t>(blockIdx.x), stride = static_cast<int32_t>(gridDim.x);
  if (threadIdx.x >= kStreamMultiplying) {
    choose_experts<kExperts>(p.choice, shared.choice);
    named_barrier_arrive(kAllBarrier, kStreamThreads);
    WeightCopies<kUpSteps, kUpStages> copies(stages, shared.ring);
    const int row = static_cast<int>(threadIdx.x % kStreamRows);
    for (int32_t item = first_item; item < items; item += stride) {
      const int32_t first = item % tiles * kHalf, of_expert = row < kHalf ? first + row : p.F + first + row - kHalf;
      const int64_t of_all = int64_t{shared.choice.chosen_K[item / tiles]} * 2 * p.F + of_expert;
      copies.copy_tile(p.w + of_all * p.K * 2, p.K);
    }
    return;
  }
  for (int i = static_cast<int>(threadIdx.x); i < p.K / 8; i += kStreamMultiplying)
    x[i] = load_activations(p.x + int64_t{i} * 16);
  named_barrier_sync(kAllBarrier, kStreamThreads);
  WeightProducts<kUpSteps, kUpStages> products(stages, shared.ring);
  int turn = 0;
  for (int32_t item = first_item; item < items; item += stride, turn ^= 1) {
    products.multiply_tile(shared.of_warps[turn][threadIdx.x / 32], smem_addr(x), p.K);
    named_barrier_sync(kMultiplyingBarrier, kStreamMultiplying);
    // Meanwhile the other warps go on to the other sums, and to the next barrier at most.
    if (threadIdx.x < 32) activate_tile(p, shared, turn, item / tiles, item % tiles * kHalf);
  }
}

struct DownParams {
  const char *w, *a;
  bf16* y;
  ColumnBias bias;
  Choose choice;  // its results are in global memory
  int32_t F, N;
};

template <class R>
struct alignas(16) DownShared {
  float of_warps[kMaxTokenChoices][kStreamWarps][kStreamRows];
  float rows[kMaxTokenChoices][kStreamRows];
  R ring;
  ChoiceRow choice;
  WeighedRow weighed;
};

// A block owns 16 columns of y, for all of the token's experts.
template <int kExperts, int kSteps, int kStages>
__global__ void __launch_bounds__(kStreamThreads, 1) token_down_kernel(DownParams p) {
  using R = WeightRing<kSteps, kStages>;
  extern __shared__ __align__(128) char stages[];
  __shared__ DownShared<R> shared;
  auto* const a = reinterpret_cast<uint4*>(stages + R::kBytes);
  if (threadIdx.x == 0) shared.ring.init();
  let_next_start();
  __syncthreads();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kStreamRows;
  const int top_k = p.choice.top_k, warp = static_cast<int>(threadIdx.x / 32);
  if (warp == kStreamWarps) {
    choose_experts<kExperts>(p.choice, shared.choice);
    named_barrier_arrive(kAllBarrier, kStreamThreads);
    WeightCopies<kSteps, kStages> copies(stages, shared.ring);
    const int row = static_cast<int>(threadIdx.x % kStreamRows);
    for (int k = 0; k < top_k; ++k) {
      const int64_t of_all = int64_t{shared.choice.chosen_K[k]} * p.N + first + row;
      copies.copy_tile(p.w + of_all * p.F * 2, p.F);
    }
    return;
  }
  if (warp == 0) {
    choose_experts<kExperts>(p.choice, shared.weighed);
  }
  wait_for_inputs();
  for (int i = static_cast<int>(threadIdx.x); i < top_k * (p.F / 8); i += kStreamMultiplying)
    a[i] = load_activations(p.a + int64_t{i} * 16);
  named_barrier_sync(kAllBarrier, kStreamThreads);
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < top_k) {
    p.choice.topk_TK[threadIdx.x] = shared.choice.chosen_K[threadIdx.x];
    p.choice.weight_TK[threadIdx.x] = shared.weighed.weight_K[threadIdx.x];
  }
  WeightProducts<kSteps, kStages> products(stages, shared.ring);
  for (int k = 0; k < top_k; ++k) products.multiply_tile(shared.of_warps[k][warp], smem_addr(a) + k * p.F * 2, p.F);
  named_barrier_sync(kMultiplyingBarrier, kStreamMultiplying);
  const int k = static_cast<int>(threadIdx.x) / kStreamRows, row = static_cast<int>(threadIdx.x) % kStreamRows;
  if (k < top_k) {
    const float bias = p.bias.b ? p.bias.at(shared.choice.chosen_K[k], first + row) : 0.0f;
    shared.rows[k][row] = rounded<bf16>(sum_of_warps(shared.of_warps[k], row, bias));
  }
  named_barrier_sync(kMultiplyingBarrier, kStreamMultiplying);
  if (threadIdx.x >= kStreamRows) return;
  float sum = 0;
  for (int j = 0; j < top_k; ++j) sum += shared.weighed.weight_K[j] * shared.rows[j][row];
  set(p.y[first + row], sum);
}

template <int kExperts>
void launch_up(Stream& s, const TokenExperts& a) {
  const Tensor& w = a.w1_e2FD;
  const UpParams p{.w = static_cast<const char*>(w.data),
                   .x = static_cast<const char*>(a.x_1D.data),
                   .a = sm80::halves(a.a_KF),
                   .bias = sm80::column_bias(a.b1_e2F, 0),
                   .activation = WordActivation(a.activation),
                   .choice = choice_of(a),
                   .F = narrow<int32_t>(w.dim(1) / 2),
                   .K = narrow<int32_t>(w.dim(2))};
  const auto shared = UpRing::kBytes + p.K * 2;
  const auto kernel = token_up_kernel<kExperts>;
  MOEBIUS_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, UpRing::kBytes + kMaxRowBytes));
  const int64_t blocks =
      std::min<int64_t>(int64_t{p.F / kHalf} * p.choice.top_k, kUpBlocks * int64_t{gpu_limits(s).num_multiprocessors});
  const LaunchShape how{
      .blocks = static_cast<unsigned>(blocks), .threads = kStreamThreads, .shared_bytes = static_cast<size_t>(shared)};
  launch_kernel(s, true, how, kernel, p);
  check_launch("token_experts");
}

template <int kExperts, int kSteps>
void launch_down(Stream& s, const TokenExperts& a) {
  constexpr int kStages = kDownBytes / WeightRing<kSteps, 1>::kStageBytes;
  const Tensor& w = a.w2_eDF;
  const DownParams p{.w = static_cast<const char*>(w.data),
                     .a = static_cast<const char*>(a.a_KF.data),
                     .y = a.y_1D.ptr<bf16>(),
                     .bias = sm80::column_bias(a.b2_eD, 0),
                     .choice = choice_of(a),
                     .F = narrow<int32_t>(w.dim(2)),
                     .N = narrow<int32_t>(w.dim(1))};
  const auto shared = WeightRing<kSteps, kStages>::kBytes + p.choice.top_k * p.F * 2;
  const auto kernel = token_down_kernel<kExperts, kSteps, kStages>;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    WeightRing<kSteps, kStages>::kBytes + kMaxRowBytes));
  const LaunchShape how{.blocks = static_cast<unsigned>(p.N / kStreamRows),
                        .threads = kStreamThreads,
                        .shared_bytes = static_cast<size_t>(shared)};
  launch_kernel(s, true, how, kernel, p);
  check_launch("token_experts");
}

bool takes_weights(const Tensor& w) {
  return w.dtype == DType::bf16 && w.dim(2) % 8 == 0 && w.dim(1) % kStreamRows == 0 &&
         w.dim(1) * w.dim(2) / 8 < INT32_MAX && rows_are_aligned(w.dim(2), 2, w.data);
}

bool takes_rule(const RouteRule& rule) { return rule.choice == RouteChoice::scores && rule.capacity == 0; }

bool takes_experts(const TokenExperts& a) {
  const int64_t E = a.logits_1E.dim(1), K = a.topk_1K.dim(1), F = a.w2_eDF.dim(2);
  const auto is_bias = [](const Tensor& b) { return b.empty() || b.dtype == DType::bf16; };
  return a.x_1D.dim(0) == 1 && a.x_1D.dtype == DType::bf16 && E <= kMaxTokenExperts && K <= kMaxTokenChoices &&
         takes_weights(a.w1_e2FD) && takes_weights(a.w2_eDF) && is_bias(a.b1_e2F) && is_bias(a.b2_eD) &&
         takes_rule(a.rule) && a.x_1D.num_bytes() <= kMaxRowBytes && K * F * 2 <= kMaxRowBytes &&
         rows_are_aligned(8, 2, a.x_1D.data, a.a_KF.data);
}

}  // namespace
}  // namespace sm90

bool takes(const Stream& s, const TokenExperts& a) { return uses_hopper_kernels(s) && sm90::takes_experts(a); }

void token_experts(Stream& s, const TokenExperts& a) {
  sm90::with_experts(a.logits_1E.dim(1), [&]<int kExperts>() {
    sm90::launch_up<kExperts>(s, a);
    // A stage holds 768 of k where that leaves less of it empty.
    a.w2_eDF.dim(2) % 768 == 0 ? sm90::launch_down<kExperts, 3>(s, a) : sm90::launch_down<kExperts, 2>(s, a);
  });
}

}  // namespace moebius::cuda
