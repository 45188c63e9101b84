#include "ops/permute/permute.h"

#include <algorithm>
#include <cstring>

#include "ops/backends_moe.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTokensPerTask = 64;
constexpr int64_t kPairsPerTask = 8192;
constexpr int64_t kBlock = 256;  // columns summed at once: 1 KiB of sums stays in L1

template <class T>
void combine_block(const Combine& a, int64_t t, int64_t first, int64_t width) {
  const int64_t D = a.out_TD.dim(1), K = a.pair_row_TK.dim(1);
  const int32_t* rows = a.pair_row_TK.ptr<int32_t>() + t * K;
  const float* weights = a.weight_TK.empty() ? nullptr : a.weight_TK.ptr<float>() + t * K;
  const T* y = a.y_RD.ptr<T>() + first;
  T* out = a.out_TD.ptr<T>() + t * D + first;
  alignas(64) float sum[kBlock] = {};
  for (int64_t k = 0; k < K; ++k) {
    if (rows[k] < 0) continue;
    const float weight = weights ? weights[k] : 1.0f;
    const T* row = y + rows[k] * D;
    for (int64_t d = 0; d < width; ++d) sum[d] += weight * to_f32(row[d]);
  }
  if (a.accumulate) {
    for (int64_t d = 0; d < width; ++d) sum[d] += to_f32(out[d]);
  }
  for (int64_t d = 0; d < width; ++d) out[d] = from_f32<T>(sum[d]);
}

}  // namespace

void combine(Stream& s, const Combine& a) {
  const int64_t T = a.out_TD.dim(0), D = a.out_TD.dim(1);
  with_float_type(a.out_TD.dtype, [&]<class F>(F) {
    parallel_rows(s.pool(), T, kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t first = 0; first < D; first += kBlock) {
          combine_block<F>(a, t, first, std::min(kBlock, D - first));
        }
      }
    });
  });
}

void gather_rows(Stream& s, const GatherRows& a) {
  const int64_t num_rows = a.offsets_E1.ptr<int32_t>()[a.offsets_E1.numel() - 1];
  const int64_t row_bytes = a.to_RD.dim(1) * size_of(a.to_RD.dtype);
  auto* to = static_cast<std::byte*>(a.to_RD.data);
  const auto* from = static_cast<const std::byte*>(a.from_ND.data);
  const int32_t* row = a.row_R.ptr<int32_t>();
  parallel_rows(s.pool(), num_rows, kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) std::memcpy(to + r * row_bytes, from + row[r] * row_bytes, row_bytes);
  });
}

void pairs_to_rows(Stream& s, const PairsToRows& a) {
  const int64_t num_rows = a.offsets_E1.ptr<int32_t>()[a.offsets_E1.numel() - 1];
  float* to = a.to_R.ptr<float>();
  const float* from = a.from_TK.ptr<float>();
  const int32_t* pair = a.row_pair_R.ptr<int32_t>();
  parallel_rows(s.pool(), num_rows, kPairsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) to[r] = from[pair[r]];
  });
}

void rows_to_pairs(Stream& s, const RowsToPairs& a) {
  float* to = a.to_TK.ptr<float>();
  const float* from = a.from_R.ptr<float>();
  const int32_t* row = a.pair_row_TK.ptr<int32_t>();
  parallel_rows(s.pool(), a.to_TK.numel(), kPairsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) to[p] = row[p] < 0 ? 0.0f : from[row[p]];
  });
}

}  // namespace moebius::cpu
