// Balance statistics, the loss that uses them, and the update of the bias for loss-free balancing. Sums run in a fixed
// order: over the tokens of a chunk, then over chunks.
#include <algorithm>
#include <cfloat>

#include "device/cuda/cuda.h"
#include "ops/routing/cuda/routing.h"
#include "ops/routing/cuda/scores.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kChunkThreads = 256, kChunkWarps = kChunkThreads / kWarpSize;
constexpr int kParts = 32;          // of the chunks of a segment
constexpr int kMaxSegments = 1024;  // at once
constexpr int kLossThreads = 1024, kLossWarps = kLossThreads / kWarpSize;

struct Stats {
  float *prob_SE, *count_SE;
  double *z_1, *entropy_1;
  const float* logits_TE;
  const int32_t* segment_T;
  BalanceScratch scratch;
  ScoreFunction score;
  int num_tokens, num_experts, top_k, num_segments;
};

// The tokens of a chunk: the inputs of sbar, the best experts as bits, and the terms of the sums.
template <int N>
struct ChunkTokens {
  float max[kTokensPerChunk], share[kTokensPerChunk];  // 1 / the divisor of the scores
  uint32_t best[kTokensPerChunk][N];
  double z[kTokensPerChunk], entropy[kTokensPerChunk];
  int segment[kTokensPerChunk];
};

template <int N>
__device__ float row_entropy(const float (&s)[N], float share, int lane, int num_experts) {
  float term[N];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const float p = s[r] * share;
    term[r] = r * kWarpSize + lane < num_experts ? p * logf(fmaxf(p, FLT_MIN)) : 0.0f;
  }
  return -row_sum(term);
}

// A warp's token j of the chunk.
template <int N>
__device__ void stats_of_token(const Stats& a, int64_t t, int j, int lane, ChunkTokens<N>& chunk) {
  float logits[N], s[N];
  load_row(a.logits_TE + t * a.num_experts, a.num_experts, lane, -INFINITY, logits);
  RowScores sums = score_row(ScoreFunction::softmax, logits, a.num_experts, lane, s);
  const double lse = sums.max + log(static_cast<double>(sums.sum));
  if (a.score != ScoreFunction::softmax) sums = score_row(a.score, logits, a.num_experts, lane, s);
  const float share = 1.0f / (sums.sum < FLT_MIN ? FLT_MIN : sums.sum);
  const float entropy = row_entropy(s, sums_to_one(a.score) ? 1.0f : share, lane, a.num_experts);
  uint32_t key[N], best[N] = {};
#pragma unroll
  for (int r = 0; r < N; ++r) key[r] = r * kWarpSize + lane < a.num_experts ? order_of(s[r]) : 0u;
  for (int k = 0; k < a.top_k; ++k) {
    const int expert = take_best(key, lane);
#pragma unroll
    for (int r = 0; r < N; ++r) best[r] |= expert / kWarpSize == r ? 1u << (expert % kWarpSize) : 0u;
  }
  if (lane != 0) return;
  chunk.max[j] = sums.max;
  chunk.share[j] = share;
  chunk.z[j] = lse * lse;
  chunk.entropy[j] = entropy;
  chunk.segment[j] = a.segment_T == nullptr ? 0 : a.segment_T[t];
#pragma unroll
  for (int r = 0; r < N; ++r) chunk.best[j][r] = best[r];
}

// Sums over the chunk's tokens for expert i, in order; a new segment begins a new piece.
template <int N>
__device__ void sum_expert(const Stats& a, const ChunkTokens<N>& chunk, int64_t first, int num, int i) {
  float prob = 0, count = 0;
  for (int j = 0; j < num; ++j) {
    const float x = a.logits_TE[(first + j) * a.num_experts + i];
    const float s = score_of(a.score, x, chunk.max[j]);
    prob += s * chunk.share[j];
    count += static_cast<float>(chunk.best[j][i / kWarpSize] >> (i % kWarpSize) & 1u);
    if (j + 1 < num && chunk.segment[j + 1] == chunk.segment[j]) continue;
    const int64_t piece = static_cast<int64_t>(blockIdx.x) + chunk.segment[j];
    a.scratch.prob_PE[piece * a.num_experts + i] = prob;
    a.scratch.count_PE[piece * a.num_experts + i] = count;
    prob = count = 0;
  }
}

// A block owns kTokensPerChunk tokens: its warps take tokens, then its threads experts.
template <int N>
__global__ void __launch_bounds__(kChunkThreads) chunk_kernel(Stats a) {
  __shared__ ChunkTokens<N> chunk;
  const int64_t first = blockIdx.x * kTokensPerChunk;
  const int num = static_cast<int>(min(kTokensPerChunk, a.num_tokens - first));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  for (int j = warp; j < num; j += kChunkWarps) stats_of_token(a, first + j, j, lane, chunk);
  __syncthreads();
  for (int i = threadIdx.x; i < a.num_experts; i += kChunkThreads) sum_expert(a, chunk, first, num, i);
  if (threadIdx.x != 0) return;
  double z = 0, entropy = 0;
  for (int j = 0; j < num; ++j) {
    z += chunk.z[j];
    entropy += chunk.entropy[j];
  }
  a.scratch.z_C[blockIdx.x] = z;
  a.scratch.entropy_C[blockIdx.x] = entropy;
}

// Returns the first token whose segment is at least `segment`.
__device__ int first_token(const Stats& a, int segment) {
  if (a.segment_T == nullptr) return segment == 0 ? 0 : a.num_tokens;
  int begin = 0, end = a.num_tokens;
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (a.segment_T[middle] < segment) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Returns the sum of x[0, n), computed by one warp: each lane adds every 32nd element.
__device__ double sum_by_warp(const double* x, int n, int lane) {
  double sum = 0;
  for (int i = lane; i < n; i += kWarpSize) sum += x[i];
  for (int width = kWarpSize / 2; width > 0; width /= 2) sum += __shfl_xor_sync(kAllLanes, sum, width);
  return sum;
}

// Sums of a segment's pieces for 32 experts: a thread takes an expert in one part of
// the segment's chunks.
__device__ void sum_pieces(const Stats& a, int segment) {
  __shared__ float prob[kParts][32], count[kParts][32];
  __shared__ int tokens[2];
  const int expert = blockIdx.x * 32 + threadIdx.x, part = threadIdx.y;
  if (threadIdx.x == 0 && part < 2) tokens[part] = first_token(a, segment + part);
  __syncthreads();
  const int chunk_begin = tokens[0] / static_cast<int>(kTokensPerChunk);
  const int chunk_end = tokens[0] < tokens[1] ? (tokens[1] - 1) / static_cast<int>(kTokensPerChunk) + 1 : chunk_begin;
  const int length = (chunk_end - chunk_begin + kParts - 1) / kParts;
  const int begin = min(chunk_begin + part * length, chunk_end), end = min(begin + length, chunk_end);
  float p = 0, c = 0;
  if (expert < a.num_experts) {
#pragma unroll 8
    for (int k = begin; k < end; ++k) {
      const int64_t piece = static_cast<int64_t>(k) + segment;
      p += a.scratch.prob_PE[piece * a.num_experts + expert];
      c += a.scratch.count_PE[piece * a.num_experts + expert];
    }
  }
  prob[part][threadIdx.x] = p;
  count[part][threadIdx.x] = c;
  __syncthreads();
  if (part == 0 && expert < a.num_experts) {
    for (int k = 1; k < kParts; ++k) {
      p += prob[k][threadIdx.x];
      c += count[k][threadIdx.x];
    }
    a.prob_SE[static_cast<int64_t>(segment) * a.num_experts + expert] = p;
    a.count_SE[static_cast<int64_t>(segment) * a.num_experts + expert] = c;
  }
  __syncthreads();
}

// A block owns 32 experts of the segments y, y + gridDim.y, ...; the first also adds up
// z and entropy.
__global__ void __launch_bounds__(32 * kParts) pieces_kernel(Stats a) {
  for (int segment = blockIdx.y; segment < a.num_segments; segment += gridDim.y) sum_pieces(a, segment);
  const int part = threadIdx.y;
  if (blockIdx.x != 0 || blockIdx.y != 0 || part > 1) return;
  const int chunks = (a.num_tokens + static_cast<int>(kTokensPerChunk) - 1) / static_cast<int>(kTokensPerChunk);
  const double sum = sum_by_warp(part == 0 ? a.scratch.z_C : a.scratch.entropy_C, chunks, threadIdx.x);
  if (threadIdx.x == 0) *(part == 0 ? a.z_1 : a.entropy_1) += sum;
}

struct Loss {
  double* loss_1;
  float* dsbar_SE;
  const float *prob_SE, *count_SE;
  const double* total_tokens_1;
  double coeff;
  int num_segments, num_experts;
};

// One block; a warp takes every kLossWarps-th segment. tokens / total * E / (K tokens^2) = E / (pairs total).
__global__ void __launch_bounds__(kLossThreads) balance_loss_kernel(Loss a) {
  __shared__ double losses[kLossWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, E = a.num_experts;
  double loss = 0;
  for (int segment = warp; segment < a.num_segments; segment += kLossWarps) {
    const int64_t first = static_cast<int64_t>(segment) * E;
    double pairs = 0, product = 0;
    for (int i = lane; i < E; i += kWarpSize) {
      pairs += a.count_SE[first + i];
      product += static_cast<double>(a.prob_SE[first + i]) * a.count_SE[first + i];
    }
    for (int width = kWarpSize / 2; width > 0; width /= 2) {
      pairs += __shfl_xor_sync(kAllLanes, pairs, width);
      product += __shfl_xor_sync(kAllLanes, product, width);
    }
    if (pairs == 0) continue;
    const double slope = a.coeff * E / (pairs * *a.total_tokens_1);
    loss += slope * product;
    for (int i = lane; i < E; i += kWarpSize)
      a.dsbar_SE[first + i] += static_cast<float>(slope * a.count_SE[first + i]);
  }
  if (lane == 0) losses[warp] = loss;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (const double part : losses) sum += part;
  *a.loss_1 += sum;
}

// One block. E (mean - load) without rounding.
__global__ void __launch_bounds__(kLossThreads)
    update_expert_bias_kernel(float* bias_E, int64_t* load_E, float rate, int64_t num_experts) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int64_t i = threadIdx.x; i < num_experts; i += kLossThreads) own += static_cast<unsigned long long>(load_E[i]);
  atomicAdd(&total, own);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < num_experts; i += kLossThreads) {
    const int64_t missing = static_cast<int64_t>(total) - load_E[i] * num_experts;
    bias_E[i] += rate * static_cast<float>((missing > 0) - (missing < 0));
    load_E[i] = 0;
  }
}

}  // namespace

void balance_stats(Stream& s, const BalanceStats& a) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), S = a.prob_SE.dim(0);
  if (S == 0) return;
  const Stats args{.prob_SE = a.prob_SE.ptr<float>(),
                   .count_SE = a.count_SE.ptr<float>(),
                   .z_1 = a.z_1.ptr<double>(),
                   .entropy_1 = a.entropy_1.ptr<double>(),
                   .logits_TE = a.logits_TE.ptr<float>(),
                   .segment_T = a.segment_T.empty() ? nullptr : a.segment_T.ptr<int32_t>(),
                   .scratch = BalanceScratch(a.scratch.data, T, E, S),
                   .score = a.score,
                   .num_tokens = static_cast<int>(T),
                   .num_experts = static_cast<int>(E),
                   .top_k = static_cast<int>(a.top_k),
                   .num_segments = static_cast<int>(S)};
  const cudaStream_t stream = cuda_stream(s);
  if (T > 0) {
    with_row_registers(E, [&]<int N>() {
      chunk_kernel<N><<<static_cast<unsigned>(div_ceil(T, kTokensPerChunk)), kChunkThreads, 0, stream>>>(args);
      check_launch("balance_stats");
    });
  }
  const dim3 blocks(static_cast<unsigned>(div_ceil(E, 32)), static_cast<unsigned>(std::min<int64_t>(S, kMaxSegments)));
  pieces_kernel<<<blocks, dim3(32, kParts), 0, stream>>>(args);
  check_launch("balance_stats");
}

void balance_loss(Stream& s, const BalanceLoss& a) {
  const Loss args{.loss_1 = a.loss_1.ptr<double>(),
                  .dsbar_SE = a.dsbar_SE.ptr<float>(),
                  .prob_SE = a.prob_SE.ptr<float>(),
                  .count_SE = a.count_SE.ptr<float>(),
                  .total_tokens_1 = a.total_tokens_1.ptr<double>(),
                  .coeff = a.coeff,
                  .num_segments = static_cast<int>(a.prob_SE.dim(0)),
                  .num_experts = static_cast<int>(a.prob_SE.dim(1))};
  balance_loss_kernel<<<1, kLossThreads, 0, cuda_stream(s)>>>(args);
  check_launch("balance_loss");
}

void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate) {
  update_expert_bias_kernel<<<1, kLossThreads, 0, cuda_stream(s)>>>(bias_E.ptr<float>(), load_E.ptr<int64_t>(), rate,
                                                                    bias_E.numel());
  check_launch("update_expert_bias");
}

}  // namespace moebius::cuda
