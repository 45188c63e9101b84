#include "ops/qk_clip/qk_clip.h"

#include <algorithm>
#include <cmath>

#include "ops/optimizer/cpu/stored_masters.h"
#include "ops/qk_clip/qk_clip_backends.h"

namespace moebius::cpu {
namespace {

// Logits that are not numbers count as 0.
float gamma_of(const QkClip& a, int64_t head) {
  const int64_t group = a.of_keys ? head : head / a.kv_group;
  const float* logits = a.max_logit_H.ptr<float>() + group * a.kv_group;
  float largest = 0;
  for (int64_t i = 0; i < a.kv_group; ++i) largest = std::max(largest, logits[i]);
  return largest > a.threshold ? a.threshold / largest : 1.0f;
}

float factor_of(const QkClip& a, int64_t row) {
  const int64_t in_head = row % a.head_rows;
  if (in_head >= a.root_rows + a.whole_rows) return 1;
  const float gamma = gamma_of(a, row / a.head_rows);
  return in_head < a.root_rows ? std::sqrt(gamma) : gamma;
}

// Scales elements [begin, end) of the tensor, which are of one row.
void scale(const QkClip& a, float factor, int64_t step, int64_t begin, int64_t end) {
  float master[kBlock];
  DrawnBits draws(a.tensor.draws, step);
  for (; begin < end; begin += kBlock) {
    const int64_t n = std::min(kBlock, end - begin);
    if (a.tensor.draws_bits()) draws.fill(begin, n);
    load_master(master, a.tensor, begin, n);
    for (int64_t i = 0; i < n; ++i) master[i] *= factor;
    store_master(a.tensor, master, draws.weight, begin, n);
  }
}

}  // namespace

void max_over_ranks(Stream&, const MaxOverRanks& a) {
  const int64_t R = a.x_RN.dim(0), N = a.max_N.numel();
  const float* x = a.x_RN.ptr<float>();
  float* max = a.max_N.ptr<float>();
  for (int64_t i = 0; i < N; ++i) {
    float largest = x[i];
    for (int64_t r = 1; r < R; ++r) largest = std::max(largest, x[r * N + i]);
    max[i] = largest;
  }
}

void qk_clip(Stream& s, const QkClip& a) {
  if (std::isnan(*a.scale_1.ptr<float>())) return;
  const int64_t step = a.lr_and_step_2.empty() ? 1 : static_cast<int64_t>(a.lr_and_step_2.ptr<double>()[1]);
  const int64_t n = a.tensor.param_n.numel(), first_row = a.first / a.cols,
                num_rows = div_ceil(a.first + n, a.cols) - first_row;
  parallel_rows(s.pool(), num_rows, 64, [&](int64_t first, int64_t last) {
    for (int64_t row = first_row + first; row < first_row + last; ++row) {
      const float factor = factor_of(a, row);
      if (factor == 1) continue;
      scale(a, factor, step, std::max(row * a.cols - a.first, int64_t{0}), std::min((row + 1) * a.cols - a.first, n));
    }
  });
}

}  // namespace moebius::cpu
