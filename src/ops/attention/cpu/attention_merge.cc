#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_merge.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

template <class T>
void merge_row(float* o, float& lse, const T* part, float part_lse, int64_t width) {
  if (part_lse == -std::numeric_limits<float>::infinity()) return;
  const float max = std::max(lse, part_lse), merged = max + std::log(std::exp(lse - max) + std::exp(part_lse - max));
  const float mine = std::exp(lse - merged), its = std::exp(part_lse - merged);
  lse = merged;
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) o[c] = mine * o[c] + its * to_f32(part[c]);
}

}  // namespace

void attention_merge(Stream& s, const AttentionMerge& a) {
  const int64_t rows = a.lse_TH.numel(), width = a.o_THd.dim(2);
  with_float_type(a.part_THd.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_rows(s.pool(), rows, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        merge_row(a.o_THd.ptr<float>() + i * width, a.lse_TH.ptr<float>()[i], a.part_THd.ptr<T>() + i * width,
                  a.part_lse_TH.ptr<float>()[i], width);
      }
    });
  });
}

}  // namespace moebius::cpu
