// Drops the pairs over an expert's capacity, by weight. (By position, index_rows drops the last ones.) Every expert's
// pairs get keys that ascend as weights descend, then as tokens ascend; the capacity-th key is found digit by digit,
// and every key after it is dropped.
#include "device/cuda/cuda.h"
#include "ops/routing/cuda/route_index.h"
#include "ops/routing/cuda/scores.h"

namespace moebius::cuda {
namespace {

constexpr int kSelectThreads = 512, kDigits = 256;

struct Drop {
  int32_t* pair_row_TK;
  float* weight_TK;
  const int32_t* topk_TK;
  RouteScratch scratch;
  int64_t capacity;
  int num_tokens, num_experts, top_k;
};

__device__ uint64_t key_of(float weight, int64_t pair) {
  return static_cast<uint64_t>(~order_of(weight)) << 32 | static_cast<uint64_t>(pair);
}

__global__ void __launch_bounds__(kIndexThreads) keys_kernel(Drop a) {
  extern __shared__ uint64_t shared[];
  const BlockIndex index = block_index(shared, a.num_experts);
  sum_totals(a.scratch.total_E, a.num_experts, INT32_MAX, index.offset_E1);
  for_each_pair(index, a.topk_TK, nullptr, a.scratch.start_BE, a.num_tokens, a.num_experts, a.top_k,
                [&](int64_t pair, int expert, int32_t rank) {
                  a.scratch.key_N[index.offset_E1[expert] + rank] = key_of(a.weight_TK[pair], pair);
                });
}

// The keys of one expert, and the digits of the key that is searched: those above `shift` are known.
struct Search {
  const uint64_t* keys;
  int64_t num_keys;
  uint64_t prefix;
  int64_t rank;  // of the wanted key among those with the prefix, from 1
};

// Finds one more digit from the counts of all its values. All threads call it.
__device__ void find_digit(Search& search, int shift) {
  __shared__ int32_t count[kDigits];
  __shared__ int32_t digit, before;
  for (int d = threadIdx.x; d < kDigits; d += kSelectThreads) count[d] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < search.num_keys; i += kSelectThreads) {
    const uint64_t key = search.keys[i];
    const bool alike = shift == 56 || key >> (shift + 8) == search.prefix >> (shift + 8);
    if (alike) atomicAdd(&count[key >> shift & (kDigits - 1)], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t sum = 0, d = 0;
    while (sum + count[d] < search.rank) sum += count[d++];
    digit = d;
    before = sum;
  }
  __syncthreads();
  search.prefix |= static_cast<uint64_t>(digit) << shift;
  search.rank -= before;
  __syncthreads();
}

// A block owns an expert.
__global__ void __launch_bounds__(kSelectThreads) select_kernel(Drop a) {
  __shared__ int32_t offset;
  const int expert = blockIdx.x;
  if (threadIdx.x == 0) offset = 0;
  __syncthreads();
  int32_t before = 0;
  for (int i = threadIdx.x; i < expert; i += kSelectThreads) before += a.scratch.total_E[i];
  atomicAdd(&offset, before);
  __syncthreads();
  const int32_t total = a.scratch.total_E[expert];
  Search search{.keys = a.scratch.key_N + offset, .num_keys = total, .prefix = 0, .rank = a.capacity};
  const bool drops = total > a.capacity;
  for (int shift = 56; shift >= 0 && drops; shift -= 8) find_digit(search, shift);
  if (threadIdx.x == 0) a.scratch.last_key_E[expert] = drops ? search.prefix : ~uint64_t{0};
}

// A block owns the tokens that it owns in route_fwd: marks its dropped pairs and counts the others.
__global__ void __launch_bounds__(kIndexThreads) mark_kernel(Drop a) {
  extern __shared__ int32_t count_E[];
  const int64_t begin = blockIdx.x * kTokensPerBlock;
  const int64_t end = min(begin + kTokensPerBlock, static_cast<int64_t>(a.num_tokens));
  for (int i = threadIdx.x; i < a.num_experts; i += kIndexThreads) count_E[i] = 0;
  __syncthreads();
  for (int64_t p = begin * a.top_k + threadIdx.x; p < end * a.top_k; p += kIndexThreads) {
    const int expert = a.topk_TK[p];
    const bool kept = key_of(a.weight_TK[p], p) <= a.scratch.last_key_E[expert];
    a.pair_row_TK[p] = kept ? 0 : -1;
    if (kept) {
      atomicAdd(&count_E[expert], 1);
    } else {
      a.weight_TK[p] = 0.0f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.num_experts; i += kIndexThreads)
    a.scratch.start_BE[static_cast<int64_t>(blockIdx.x) * a.num_experts + i] = count_E[i];
}

}  // namespace

void drop_light(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const Drop args{.pair_row_TK = a.route.pair_row_TK.ptr<int32_t>(),
                  .weight_TK = a.route.weight_TK.ptr<float>(),
                  .topk_TK = a.route.topk_TK.ptr<int32_t>(),
                  .scratch = scratch,
                  .capacity = a.rule.capacity,
                  .num_tokens = static_cast<int>(T),
                  .num_experts = static_cast<int>(E),
                  .top_k = static_cast<int>(K)};
  const auto blocks = static_cast<unsigned>(div_ceil(T, kTokensPerBlock));
  const cudaStream_t stream = cuda_stream(s);
  keys_kernel<<<blocks, kIndexThreads, block_index_bytes(E), stream>>>(args);
  check_launch("route_fwd");
  select_kernel<<<static_cast<unsigned>(E), kSelectThreads, 0, stream>>>(args);
  check_launch("route_fwd");
  mark_kernel<<<blocks, kIndexThreads, static_cast<size_t>(4 * E), stream>>>(args);
  check_launch("route_fwd");
}

}  // namespace moebius::cuda
