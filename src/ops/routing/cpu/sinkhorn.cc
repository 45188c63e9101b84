// Sinkhorn's fixed point as Megatron iterates it: with cost c = exp(logits), eps = 1e-8,
//   d0[t] = 1/T / (sum over i of d1[i] c[t,i] + eps)
//   d1[i] = 1/E / (sum over t of d0[t] c[t,i] + eps)
// until mean |change of d1| <= 1e-4.
// The row maximum is taken out of c: d0 absorbs it, and nothing overflows.
#include <algorithm>
#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/routing/cpu/routing.h"

namespace moebius::cpu {
namespace {

constexpr int kMaxIterations = 100;
constexpr float kTolerance = 1e-4f, kEps = 1e-8f;

float dot(const float* x, const float* y, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

void exp_rows(const float* logits, float* cost, int64_t begin, int64_t end, int64_t num_experts) {
  for (int64_t t = begin; t < end; ++t) {
    const float* row = logits + t * num_experts;
    const float max = *std::max_element(row, row + num_experts);
    for (int64_t i = 0; i < num_experts; ++i) cost[t * num_experts + i] = exp_f32(row[i] - max);
  }
}

// Computes the column sums of d0 c over the rows of a block, with d0 from the previous d1.
void sum_block(const float* cost, const float* d1, float* sum, int64_t begin, int64_t end, int64_t num_tokens,
               int64_t num_experts) {
  std::fill_n(sum, num_experts, 0.0f);
  for (int64_t t = begin; t < end; ++t) {
    const float* row = cost + t * num_experts;
    const float d0 = 1.0f / static_cast<float>(num_tokens) / (dot(d1, row, num_experts) + kEps);
    for (int64_t i = 0; i < num_experts; ++i) sum[i] += d0 * row[i];
  }
}

// Computes d1 from the sums of all blocks in order, and returns the mean of its changes.
float update_columns(const float* partial, float* d1, int64_t blocks, int64_t num_experts) {
  float moved = 0;
  for (int64_t i = 0; i < num_experts; ++i) {
    float sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += partial[b * num_experts + i];
    const float next = 1.0f / static_cast<float>(num_experts) / (sum + kEps);
    moved += std::abs(next - d1[i]);
    d1[i] = next;
  }
  return moved / static_cast<float>(num_experts);
}

}  // namespace

void sinkhorn(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), blocks = num_blocks(T);
  std::fill_n(scratch.column_scale_E, E, 1.0f);
  parallel_rows(s.pool(), T, kTokensPerBlock, [&](int64_t begin, int64_t end) {
    exp_rows(a.logits_TE.ptr<float>(), scratch.cost_TE, begin, end, E);
  });
  float moved = kTolerance + 1;
  for (int iteration = 0; iteration < kMaxIterations && moved > kTolerance; ++iteration) {
    s.pool().run(blocks, [&](int64_t block, int) {
      const int64_t begin = block * kTokensPerBlock;
      sum_block(scratch.cost_TE, scratch.column_scale_E, scratch.partial_BE + block * E, begin,
                std::min(T, begin + kTokensPerBlock), T, E);
    });
    moved = update_columns(scratch.partial_BE, scratch.column_scale_E, blocks, E);
  }
}

}  // namespace moebius::cpu
