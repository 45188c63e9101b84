// route_fwd: each warp chooses the experts for one token after the other; then the pairs are counted, dropped over
// capacity, and indexed. Counts never leave the device. It takes three launches, unless pairs are dropped by weight;
// and one for few tokens without a capacity, as when text is generated, since launches are most of the time then.
#include <limits>

#include "device/cuda/cuda.h"
#include "ops/cuda/early_launch.h"
#include "ops/routing/cuda/choose_row.h"
#include "ops/routing/cuda/route_index.h"
#include "ops/routing/cuda/routing.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kWarps = 8;

int64_t choose_shared_bytes(int64_t num_experts, int64_t top_k) {
  return 4 * (num_experts + kWarps * (num_experts + top_k));
}

// A block owns kTokensPerBlock tokens, a warp every kWarps-th of them. Writes their experts, counts how often each was
// chosen in the block, and calls fn(token, choice, expert). shared: choose_shared_bytes, which begin with the counts.
template <int N, int M, class F>
__device__ __forceinline__ void choose_tokens(const Choose& a, int32_t* shared, F&& fn) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  int32_t* count_E = shared;
  int32_t* own = shared + a.num_experts + warp * (a.num_experts + a.top_k);
  const ChooseRow row{reinterpret_cast<float*>(own), own + a.num_experts};
  for (int i = threadIdx.x; i < a.num_experts; i += blockDim.x) count_E[i] = 0;
  __syncthreads();
  for (int j = warp; j < kTokensPerBlock; j += kWarps) {
    const int64_t t = blockIdx.x * kTokensPerBlock + j;
    if (t >= a.num_tokens) break;
    float logits[N], s[N];
    load_row(a.logits_TE + t * a.num_experts, a.num_experts, lane, -INFINITY, logits);
    score_row(a.score, logits, a.num_experts, lane, s);
    choose_row(a, row, t, lane, s);
    weigh_row<M>(a, row, t, lane, s);
    for (int k = lane; k < a.top_k; k += kWarpSize) {
      const int32_t expert = row.chosen_K[k];
      a.topk_TK[t * a.top_k + k] = expert;
      atomicAdd(&count_E[expert], 1);
      fn(t, k, expert);
    }
    __syncwarp();
  }
  __syncthreads();
}

template <int N, int M>
__global__ void __launch_bounds__(kWarps* kWarpSize) choose_kernel(Choose a) {
  extern __shared__ int32_t shared[];
  let_next_start();
  wait_for_inputs();
  choose_tokens<N, M>(a, shared, [](int64_t, int, int32_t) {});
  for (int i = threadIdx.x; i < a.num_experts; i += blockDim.x)
    a.start_BE[static_cast<int64_t>(blockIdx.x) * a.num_experts + i] = shared[i];
}

// The outputs of the index of one block of tokens; no pair is dropped.
struct Places {
  int32_t *counts_E, *offsets_E1, *row_token_R, *row_pair_R, *pair_row_TK;
  int64_t* load_E;  // may be null
};

static_assert(kIndexThreads == kWarps * kWarpSize);

// One block chooses for all tokens, and indexes their pairs.
template <int N, int M>
__global__ void __launch_bounds__(kIndexThreads) choose_and_index_kernel(Choose a, Places p) {
  extern __shared__ uint64_t words[];
  const int E = a.num_experts;
  const BlockIndex index = block_index(words, E);
  int32_t* const topk_TK = index.offset_E1 + E + 2;
  int32_t* const count_E = topk_TK + a.num_tokens * a.top_k;
  let_next_start();
  for (int i = threadIdx.x; i < E; i += kIndexThreads) index.tokens_E[i] = 0;
  wait_for_inputs();
  choose_tokens<N, M>(a, count_E, [&](int64_t t, int k, int32_t expert) {
    topk_TK[t * a.top_k + k] = expert;
    atomicOr(reinterpret_cast<unsigned long long*>(&index.tokens_E[expert]), 1ull << t);
  });
  sum_totals(count_E, E, std::numeric_limits<int32_t>::max(), index.offset_E1);
  for (int pair = threadIdx.x; pair < a.num_tokens * a.top_k; pair += kIndexThreads) {
    const int t = pair / a.top_k, expert = topk_TK[pair];
    const int32_t row = index.offset_E1[expert] + __popcll(index.tokens_E[expert] & ((1ull << t) - 1));
    p.pair_row_TK[pair] = row;
    p.row_token_R[row] = t;
    p.row_pair_R[row] = pair;
  }
  for (int i = threadIdx.x; i < E; i += kIndexThreads) {
    p.counts_E[i] = count_E[i];
    p.offsets_E1[i + 1] = index.offset_E1[i + 1];
    if (p.load_E) p.load_E[i] += count_E[i];
  }
  if (threadIdx.x == 0) p.offsets_E1[0] = 0;
}

// Returns the shared memory of choose_and_index_kernel.
int64_t few_shared_bytes(int64_t num_tokens, int64_t num_experts, int64_t top_k) {
  return static_cast<int64_t>(block_index_bytes(num_experts)) + 4 * num_tokens * top_k +
         choose_shared_bytes(num_experts, top_k);
}

bool takes_one_block(const RouteFwd& a) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  return 0 < T && T <= kEarlyRows && a.rule.capacity == 0 && few_shared_bytes(T, E, K) <= 48 * 1024;
}

Choose choose_args(const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  return {.topk_TK = a.route.topk_TK.ptr<int32_t>(),
          .weight_TK = a.route.weight_TK.ptr<float>(),
          .start_BE = scratch.start_BE,
          .logits_TE = a.logits_TE.ptr<float>(),
          .bias_E = a.bias_E.empty() ? nullptr : a.bias_E.ptr<float>(),
          .cost_TE = scratch.cost_TE,
          .column_scale_E = scratch.column_scale_E,
          .rule = a.rule,
          .score = weight_score(a.rule, K),
          .num_tokens = static_cast<int>(T),
          .num_experts = static_cast<int>(E),
          .top_k = static_cast<int>(K)};
}

void choose(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  if (T == 0) return;
  const Choose args = choose_args(a, scratch);
  const auto blocks = static_cast<unsigned>(div_ceil(T, kTokensPerBlock));
  const auto shared_bytes = static_cast<size_t>(choose_shared_bytes(E, K));
  with_row_registers(E, K, [&]<int N, int M>() {
    if (shared_bytes > 48 * 1024)
      MOEBIUS_CUDA(cudaFuncSetAttribute(choose_kernel<N, M>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
    const LaunchShape how{.blocks = blocks, .threads = kWarps * kWarpSize, .shared_bytes = shared_bytes};
    launch_kernel(s, T <= kEarlyRows, how, choose_kernel<N, M>, args);
    check_launch("route_fwd");
  });
}

void choose_and_index(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const Places places{.counts_E = a.route.counts_E.ptr<int32_t>(),
                      .offsets_E1 = a.route.offsets_E1.ptr<int32_t>(),
                      .row_token_R = a.route.row_token_R.ptr<int32_t>(),
                      .row_pair_R = a.route.row_pair_R.ptr<int32_t>(),
                      .pair_row_TK = a.route.pair_row_TK.ptr<int32_t>(),
                      .load_E = a.load_E.empty() ? nullptr : a.load_E.ptr<int64_t>()};
  const LaunchShape how{
      .blocks = 1, .threads = kIndexThreads, .shared_bytes = static_cast<size_t>(few_shared_bytes(T, E, K))};
  with_row_registers(E, K, [&]<int N, int M>() {
    launch_kernel(s, true, how, choose_and_index_kernel<N, M>, choose_args(a, scratch), places);
  });
  check_launch("route_fwd");
}

}  // namespace

void route_fwd(Stream& s, const RouteFwd& a) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const RouteScratch scratch(a.scratch.data, T, E, K, a.rule);
  const bool by_weight = a.rule.capacity > 0 && a.rule.drop == RouteDrop::probs && T > 0;
  if (a.rule.choice == RouteChoice::sinkhorn && T > 0) sinkhorn(s, a, scratch);
  if (takes_one_block(a)) return choose_and_index(s, a, scratch);
  choose(s, a, scratch);
  scan_blocks(s, a, scratch, true);
  if (by_weight) {
    drop_light(s, a, scratch);
    scan_blocks(s, a, scratch, false);
  }
  index_rows(s, a, scratch, by_weight);
}

}  // namespace moebius::cuda
