#include "ops/vocab/vocab.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cpu {
namespace {

int64_t row_of(int32_t token, int64_t vocab) {
  MOEBIUS_ASSERT(0 <= token && token < vocab);
  return token;
}

// Returns the row in a table that may be a block of a larger one; -1: the row is not in this block.
template <class Op>
int64_t row_of(const Op& a, int32_t token, int64_t vocab) {
  if (!a.is_block) return row_of(token, vocab);
  return a.first <= token && token < a.first + vocab ? token - a.first : -1;
}

// Adds columns [begin, end) of all tokens in order. So no two tasks write the same memory, and each sum has the order
// of the tokens.
template <class T>
void embedding_bwd_columns(const EmbeddingBwd& a, int64_t begin, int64_t end) {
  const int64_t width = a.dx_TD.dim(1), vocab = a.dw_VD.dim(0);
  for (int64_t t = 0; t < a.dx_TD.dim(0); ++t) {
    const int64_t row = row_of(a, a.token_T.ptr<int32_t>()[t], vocab);
    if (row < 0) continue;
    float* dw = a.dw_VD.ptr<float>() + row * width;
    const T* dx = a.dx_TD.ptr<T>() + t * width;
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) dw[j] += to_f32(dx[j]);
  }
}

// Replaces x by e^(x - max), and returns the sum.
float exponentials(float* x, int64_t n, float max) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    x[i] = exp_f32(x[i] - max);
    sum += x[i];
  }
  return sum;
}

// Returns the loss of one token from its logits, which become scratch; and the derivative w.r.t. them,
// if asked for.
template <class T>
float loss_row(T* dlogits, float* logits, int64_t vocab, int32_t target, float weight, float scale) {
  if (weight == 0) {
    if (dlogits) std::fill(dlogits, dlogits + vocab, T{});
    return 0;
  }
  const int64_t at = row_of(target, vocab);
  const float target_logit = logits[at], max = max_of(logits, vocab), sum = exponentials(logits, vocab, max);
  if (dlogits) {
    const float factor = scale * weight / sum;
#pragma omp simd
    for (int64_t v = 0; v < vocab; ++v) dlogits[v] = from_f32<T>(logits[v] * factor);
    dlogits[at] = from_f32<T>(logits[at] * factor - scale * weight);
  }
  return weight * (std::log(sum) + (max - target_logit));
}

template <class T>
void loss_rows(Stream& s, const LmLoss& a, const Tensor& logits, int64_t first) {
  const int64_t vocab = a.w_VD.dim(0);
  const float scale = a.scale_1.empty() ? a.scale : *a.scale_1.ptr<float>();
  T* dlogits = a.dx_TD.empty() ? nullptr : a.dlogits_CV.ptr<T>();
  parallel_rows(s.pool(), logits.dim(0), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = first + i;
      a.loss_T.ptr<float>()[t] = loss_row(dlogits ? dlogits + i * vocab : nullptr, logits.ptr<float>() + i * vocab,
                                          vocab, a.target_T.ptr<int32_t>()[t], a.weight_T.ptr<float>()[t], scale);
    }
  });
}

}  // namespace

void embedding_fwd(Stream& s, const EmbeddingFwd& a) {
  const int64_t vocab = a.w_VD.dim(0), row_bytes = a.w_VD.dim(1) * size_of(a.w_VD.dtype);
  const char* w = static_cast<const char*>(a.w_VD.data);
  char* x = static_cast<char*>(a.x_TD.data);
  parallel_rows(s.pool(), a.x_TD.dim(0), 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = row_of(a, a.token_T.ptr<int32_t>()[t], vocab);
      if (row < 0)
        std::memset(x + t * row_bytes, 0, row_bytes);
      else
        std::memcpy(x + t * row_bytes, w + row * row_bytes, row_bytes);
    }
  });
}

void embedding_bwd(Stream& s, const EmbeddingBwd& a) {
  with_float_type(a.dx_TD.dtype, [&](auto zero) {
    parallel_rows(s.pool(), a.dx_TD.dim(1), 128,
                  [&](int64_t begin, int64_t end) { embedding_bwd_columns<decltype(zero)>(a, begin, end); });
  });
}

void lm_loss(Stream& s, const LmLoss& a) {
  const int64_t tokens = a.x_TD.dim(0), chunk = a.logits_CV.dim(0);
  const bool grads = !a.dx_TD.empty();
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t end = std::min(tokens, begin + chunk);
    const Tensor x = a.x_TD.rows(begin, end), logits = a.logits_CV.rows(0, end - begin);
    cpu::gemm(s, {.c_MN = logits, .a = x, .b = a.w_VD, .trans_b = true});
    with_float_type(x.dtype, [&](auto zero) { loss_rows<decltype(zero)>(s, a, logits, begin); });
    if (!grads) continue;
    const Tensor dlogits = a.dlogits_CV.rows(0, end - begin);
    cpu::gemm(s, {.c_MN = a.dx_TD.rows(begin, end), .a = dlogits, .b = a.w_VD});
    if (!a.dw_VD.empty()) cpu::gemm(s, {.c_MN = a.dw_VD, .a = dlogits, .b = x, .trans_a = true, .accumulate = true});
  }
}

}  // namespace moebius::cpu
