#include "ops/permute/local_pairs.h"

#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

struct Local {
  int32_t *topk_NL, *k_NL;
  float* weight_NL;
  const int32_t *topk_NK, *kept_NK;  // kept may be null
  const float* weight_NK;
  int64_t num_pairs;  // N L
  uint32_t pairs_of_token;
  int top_k, first_expert, num_experts;
};

// A thread owns one of the L pairs of a token, and looks for it among the token's K.
__global__ void __launch_bounds__(kThreads) local_pairs_kernel(Local a) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.num_pairs) return;
  const int64_t n = quotient(i, a.pairs_of_token), first = n * a.top_k;
  int before = static_cast<int>(i - n * a.pairs_of_token);  // pairs of the token that come first
  int found = -1;
  for (int k = 0; k < a.top_k && found < 0; ++k) {
    const int expert = a.topk_NK[first + k] - a.first_expert;
    if (expert < 0 || expert >= a.num_experts || (a.kept_NK && a.kept_NK[first + k] < 0)) continue;
    if (before-- == 0) found = k;
  }
  a.topk_NL[i] = found < 0 ? -1 : a.topk_NK[first + found];
  a.k_NL[i] = found;
  a.weight_NL[i] = found < 0 ? 0.0f : a.weight_NK[first + found];
}

__global__ void __launch_bounds__(kThreads)
    local_pairs_to_rows_kernel(float* to, const float* from, const int32_t* row, int64_t num_pairs) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < num_pairs && row[i] >= 0) to[row[i]] = from[i];
}

// A thread owns one of the K pairs of a token.
__global__ void __launch_bounds__(kThreads)
    rows_to_all_pairs_kernel(float* to, const float* from, const int32_t* row, const int32_t* k_of_pair,
                             int64_t num_pairs, uint32_t top_k, int pairs_of_token) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_pairs) return;
  const int64_t n = quotient(i, top_k), first = n * pairs_of_token;
  const auto k = static_cast<int32_t>(i - n * top_k);
  float x = 0;
  for (int l = 0; l < pairs_of_token; ++l)
    if (row[first + l] >= 0 && k_of_pair[first + l] == k) x = from[row[first + l]];
  to[i] = x;
}

}  // namespace

void local_pairs(Stream& s, const LocalPairs& a) {
  const Local local{.topk_NL = a.topk_NL.ptr<int32_t>(),
                    .k_NL = a.k_NL.ptr<int32_t>(),
                    .weight_NL = a.weight_NL.ptr<float>(),
                    .topk_NK = a.topk_NK.ptr<int32_t>(),
                    .kept_NK = a.kept_NK.empty() ? nullptr : a.kept_NK.ptr<int32_t>(),
                    .weight_NK = a.weight_NK.ptr<float>(),
                    .num_pairs = a.topk_NL.numel(),
                    .pairs_of_token = static_cast<uint32_t>(narrow<int>(a.topk_NL.dim(1))),
                    .top_k = narrow<int>(a.topk_NK.dim(1)),
                    .first_expert = narrow<int>(a.first_expert),
                    .num_experts = narrow<int>(a.num_experts)};
  local_pairs_kernel<<<num_blocks(local.num_pairs, kThreads), kThreads, 0, cuda_stream(s)>>>(local);
  check_launch("local_pairs");
}

void local_pairs_to_rows(Stream& s, const LocalPairsToRows& a) {
  const int64_t n = a.from_NL.numel();
  local_pairs_to_rows_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.to_R.ptr<float>(), a.from_NL.ptr<float>(), a.pair_row_NL.ptr<int32_t>(), n);
  check_launch("local_pairs_to_rows");
}

void rows_to_all_pairs(Stream& s, const RowsToAllPairs& a) {
  const int64_t n = a.to_NK.numel();
  rows_to_all_pairs_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.to_NK.ptr<float>(), a.from_R.ptr<float>(), a.pair_row_NL.ptr<int32_t>(), a.k_NL.ptr<int32_t>(), n,
      static_cast<uint32_t>(narrow<int>(a.to_NK.dim(1))), narrow<int>(a.pair_row_NL.dim(1)));
  check_launch("rows_to_all_pairs");
}

}  // namespace moebius::cuda
