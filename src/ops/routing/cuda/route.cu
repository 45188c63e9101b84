// route_fwd: each warp chooses the experts for one token after the other; then the pairs are counted, dropped over
// capacity, and indexed. Counts never leave the device. It takes three launches, unless pairs are dropped by weight;
// and one for few tokens without a capacity, as when text is generated, since launches are most of the time then.
#include <limits>

#include "device/cuda/cuda.h"
#include "ops/cuda/early_launch.h"
#include "ops/routing/cuda/route_index.h"
#include "ops/routing/cuda/routing.h"
#include "ops/routing/cuda/scores.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kWarps = 8;

struct Choose {
  int32_t* topk_TK;
  float* weight_TK;
  int32_t* start_BE;
  const float *logits_TE, *bias_E;
  const float *cost_TE, *column_scale_E;  // sinkhorn
  RouteRule rule;
  ScoreFunction score;  // of the weights
  int num_tokens, num_experts, top_k;
};

// Shared memory of a warp: a row of values, and the chosen experts.
struct ChooseRow {
  float* value_E;
  int32_t* chosen_K;
};

int64_t choose_shared_bytes(int64_t num_experts, int64_t top_k) {
  return 4 * (num_experts + kWarps * (num_experts + top_k));
}

// Clears the keys of all experts outside of the best groups.
template <int N>
__device__ void keep_best_groups(const Choose& a, const float* value, int lane, uint32_t (&key)[N]) {
  const RouteRule& rule = a.rule;
  const int num_groups = static_cast<int>(rule.num_groups), kept = static_cast<int>(rule.topk_groups);
  const int width = a.num_experts / num_groups, count = static_cast<int>(rule.group_top(a.top_k));
  uint32_t group[N] = {}, part[N], left[N] = {};
  const auto set_score = [&](int g, float sum) {
#pragma unroll
    for (int r = 0; r < N; ++r) group[r] = r * kWarpSize + lane == g ? order_of(sum) : group[r];
  };
  if (width == kWarpSize) {  // a group is a register
#pragma unroll
    for (int r = 0; r < N; ++r) {
      uint32_t own[1] = {key[r]};
      float sum = 0;
      for (int j = 0; j < count && r < num_groups; ++j)
        sum = __fadd_rn(sum, value[r * kWarpSize + take_best(own, lane)]);
      if (r < num_groups) set_score(r, sum);
    }
  }
  for (int g = 0; g < num_groups && width != kWarpSize; ++g) {
    keys_between(key, g * width, (g + 1) * width, lane, part);
    float sum = 0;
    for (int j = 0; j < count; ++j) sum = __fadd_rn(sum, value[take_best(part, lane)]);
    set_score(g, sum);
  }
  for (int j = 0; j < kept; ++j) {
    const int g = take_best(group, lane);
    keys_between(key, g * width, (g + 1) * width, lane, part);
#pragma unroll
    for (int r = 0; r < N; ++r) left[r] = max(left[r], part[r]);
  }
#pragma unroll
  for (int r = 0; r < N; ++r) key[r] = left[r];
}

// The K best values of the row in v, greatest first.
template <int N>
__device__ void choose_best(const Choose& a, const ChooseRow& row, int lane, const float (&v)[N]) {
  uint32_t key[N];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    key[r] = i < a.num_experts ? order_of(v[r]) : 0u;
  }
  if (a.rule.num_groups > 1) {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const int i = r * kWarpSize + lane;
      if (i < a.num_experts) row.value_E[i] = v[r];
    }
    __syncwarp();
    keep_best_groups(a, row.value_E, lane, key);
    __syncwarp();
  }
  for (int k = 0; k < a.top_k; ++k) {
    const int expert = take_best(key, lane);
    if (lane == 0) row.chosen_K[k] = expert;
  }
  __syncwarp();
}

template <int N>
__device__ void choose_row(const Choose& a, const ChooseRow& row, int64_t t, int lane, const float (&s)[N]) {
  float v[N];
  if (a.rule.choice == RouteChoice::forced) {
    for (int k = lane; k < a.top_k; k += kWarpSize)
      row.chosen_K[k] = static_cast<int32_t>((t * a.top_k + k) % a.num_experts);
    return __syncwarp();
  }
  if (a.rule.choice == RouteChoice::sinkhorn) {
    float scale[N];
    load_row(a.cost_TE + t * a.num_experts, a.num_experts, lane, 0.0f, v);
    load_row(a.column_scale_E, a.num_experts, lane, 0.0f, scale);
#pragma unroll
    for (int r = 0; r < N; ++r) v[r] = __fmul_rn(v[r], scale[r]);
    return choose_best(a, row, lane, v);
  }
  if (a.bias_E == nullptr) return choose_best(a, row, lane, s);
  load_row(a.bias_E, a.num_experts, lane, 0.0f, v);
#pragma unroll
  for (int r = 0; r < N; ++r) v[r] = __fadd_rn(s[r], v[r]);
  choose_best(a, row, lane, v);
}

// weight[t, :] of the chosen, normalised and scaled; sums run in the order of k. s / sum of s is,
// for softmax, computed as the softmax over the chosen: no 0/0 when a bias chose experts whose
// scores vanish.
template <int M, int N>
__device__ void weigh_row(const Choose& a, const ChooseRow& row, int64_t t, int lane, const float (&s)[N]) {
  const bool of_chosen = a.rule.normalize && a.score == ScoreFunction::softmax;
  const float* logits = a.logits_TE + t * a.num_experts;
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    if (i < a.num_experts) row.value_E[i] = s[r];
  }
  __syncwarp();
  float weight[M], max = -INFINITY;
#pragma unroll
  for (int r = 0; r < M; ++r) {
    const int k = r * kWarpSize + lane;
    weight[r] = -INFINITY;
    if (k < a.top_k) weight[r] = of_chosen ? logits[row.chosen_K[k]] : row.value_E[row.chosen_K[k]];
    max = fmaxf(max, weight[r]);
  }
  max = of_chosen ? warp_max(max) : 0.0f;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < M; ++r) {
    if (of_chosen) weight[r] = exp_f32(__fsub_rn(weight[r], max));
    const int k = r * kWarpSize + lane;
    if (k < a.top_k) row.value_E[k] = weight[r];
  }
  __syncwarp();
  float sum = 1.0f;
  if (a.rule.normalize) {
    sum = 0;
    for (int k = 0; k < a.top_k; ++k) sum = __fadd_rn(sum, row.value_E[k]);
    if (!of_chosen) sum = __fadd_rn(sum, 1e-20f);
  }
#pragma unroll
  for (int r = 0; r < M; ++r) {
    const int k = r * kWarpSize + lane;
    if (k < a.top_k) a.weight_TK[t * a.top_k + k] = __fmul_rn(__fdiv_rn(weight[r], sum), a.rule.scale);
  }
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
