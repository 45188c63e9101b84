#include "ops/vocab/vocab_blocks.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cpu {
namespace {

bool has_row(int32_t target, int64_t first, int64_t rows) { return first <= target && target < first + rows; }

float sum_of_exponentials(const float* x, int64_t n, float max) {
  if (max == -INFINITY) return 0;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp_f32(x[i] - max);
  return sum;
}

// The statistics of a token's logits over the whole vocabulary, merged from its blocks in order.
struct RowStats {
  float max, sum, target_logit;
};
RowStats merged(const float* stats_nC3, int64_t num_blocks, int64_t rows, int64_t t) {
  RowStats all{stats_nC3[3 * t], 0, 0};
  for (int64_t b = 1; b < num_blocks; ++b) all.max = std::max(all.max, stats_nC3[3 * (b * rows + t)]);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const float* block = stats_nC3 + 3 * (b * rows + t);
    all.sum += block[1] * exp_f32(block[0] - all.max);
    all.target_logit += block[2];
  }
  return all;
}

// dlogits = factor e^(logit - max), less `at_target` in the target's column where that is in this block (column >= 0).
template <class T>
void dlogits_row(T* dlogits, const float* logits, int64_t n, float max, float factor, int64_t column, float at_target) {
#pragma omp simd
  for (int64_t v = 0; v < n; ++v) dlogits[v] = from_f32<T>(exp_f32(logits[v] - max) * factor);
  if (column >= 0) dlogits[column] = from_f32<T>(exp_f32(logits[column] - max) * factor - at_target);
}

template <class T>
void loss_rows(Stream& s, const LmLossBlock& a) {
  const int64_t rows = a.x_CD.dim(0), vocab = a.w_VD.dim(0);
  const float scale = a.scale_1.empty() ? a.scale : *a.scale_1.ptr<float>();
  const float* weights = a.weight_C.ptr<float>();
  T* dlogits = a.dx_CD.empty() ? nullptr : a.dlogits_CV.ptr<T>();
  parallel_rows(s.pool(), rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const RowStats all = merged(a.stats_nC3.ptr<float>(), a.stats_nC3.dim(0), rows, t);
      const float weight = weights[t];
      a.loss_C.ptr<float>()[t] = weight == 0 ? 0 : weight * (std::log(all.sum) + (all.max - all.target_logit));
      if (!dlogits) continue;
      if (weight == 0) {
        std::fill(dlogits + t * vocab, dlogits + (t + 1) * vocab, T{});
        continue;
      }
      const int32_t target = a.target_C.ptr<int32_t>()[t];
      dlogits_row(dlogits + t * vocab, a.logits_CV.ptr<float>() + t * vocab, vocab, all.max, scale * weight / all.sum,
                  has_row(target, a.first, vocab) ? target - a.first : -1, scale * weight);
    }
  });
}

}  // namespace

void lm_logits_block(Stream& s, const LmLogitsBlock& a) {
  const int64_t vocab = a.w_VD.dim(0);
  cpu::gemm(s, {.c_MN = a.logits_CV, .a = a.x_CD, .b = a.w_VD, .trans_b = true});
  parallel_rows(s.pool(), a.x_CD.dim(0), 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = a.logits_CV.ptr<float>() + t * vocab;
      const int32_t target = a.target_C.ptr<int32_t>()[t];
      float* stats = a.stats_C3.ptr<float>() + 3 * t;
      stats[0] = max_of(logits, vocab);
      stats[1] = sum_of_exponentials(logits, vocab, stats[0]);
      stats[2] = has_row(target, a.first, vocab) ? logits[target - a.first] : 0.0f;
    }
  });
}

void lm_loss_block(Stream& s, const LmLossBlock& a) {
  with_float_type(a.x_CD.dtype, [&](auto zero) { loss_rows<decltype(zero)>(s, a); });
  if (a.dx_CD.empty()) return;
  cpu::gemm(s, {.c_MN = a.dx_CD, .a = a.dlogits_CV, .b = a.w_VD});
  if (!a.dw_VD.empty())
    cpu::gemm(s, {.c_MN = a.dw_VD, .a = a.dlogits_CV, .b = a.x_CD, .trans_a = true, .accumulate = true});
}

}  // namespace moebius::cpu
