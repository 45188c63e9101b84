#include "ops/permute/permute.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ops/cpu/lane_pairs.h"
#include "ops/cpu/vector.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTokensPerTask = 64;
constexpr int64_t kPairsPerTask = 8192;
constexpr int kNumPairs = 4;  // of lanes with sums in registers
constexpr int64_t kBlock = kNumPairs * kNumPaired;

// The rows of a token's pairs, and their weights.
struct Rows {
  const int32_t* row;
  const float* weights;  // null: 1
  int64_t num;
};

// Replaces a NaN by one without payload, so that sums with it are NaNs that store_pair handles.
inline float without_payload(float weight) {
  return weight == weight ? weight : std::numeric_limits<float>::quiet_NaN();
}

// Calls add(row, weight) with the first column of each.
template <class T, class Add>
void for_each_row(const Rows& rows, const T* y, int64_t D, Add&& add) {
  for (int64_t k = 0; k < rows.num; ++k)
    if (rows.row[k] >= 0) add(y + rows.row[k] * D, rows.weights ? without_payload(rows.weights[k]) : 1.0f);
}

// Computes kBlock columns of a token's out. y: the first row.
template <bool kAccumulate, class T>
void combine_block(T* out, const T* y, int64_t D, const Rows& rows) {
  LanePair sum[kNumPairs] = {};
  const auto add = [&](const T* row, float weight) {
    for (int i = 0; i < kNumPairs; ++i) {
      const LanePair x = load_pair(row + i * kNumPaired);
      sum[i].a += weight * x.a;
      sum[i].b += weight * x.b;
    }
  };
  for_each_row(rows, y, D, add);
  if constexpr (kAccumulate) add(out, 1.0f);
  for (int i = 0; i < kNumPairs; ++i) store_pair(out + i * kNumPaired, sum[i]);
}

// Does the same for at most kNumLanes columns.
template <bool kAccumulate, class Out, class T>
void combine_lanes(Out* out, const T* y, int64_t D, const Rows& rows, int64_t width) {
  Lanes sum = {};
  const auto add = [&](const auto* row, float weight) { sum += weight * load_lanes(row, width); };
  for_each_row(rows, y, D, add);
  if constexpr (kAccumulate) add(out, 1.0f);
  store_lanes(out, sum, width);
}

template <bool kAccumulate, class Out, class T>
void combine_token(const Combine& a, int64_t t) {
  const int64_t D = a.out_TD.dim(1), K = a.pair_row_TK.dim(1);
  const Rows rows{.row = a.pair_row_TK.ptr<int32_t>() + t * K,
                  .weights = a.weight_TK.empty() ? nullptr : a.weight_TK.ptr<float>() + t * K,
                  .num = K};
  Out* out = a.out_TD.ptr<Out>() + t * D;
  const T* y = a.y_RD.ptr<T>();
  int64_t d = 0;
  if constexpr (std::is_same_v<Out, T>)
    for (; d + kBlock <= D; d += kBlock) combine_block<kAccumulate>(out + d, y + d, D, rows);
  for (; d < D; d += kNumLanes) combine_lanes<kAccumulate>(out + d, y + d, D, rows, std::min(kNumLanes, D - d));
}

template <class Out, class T>
void combine_as(Stream& s, const Combine& a) {
  const auto combine_one = a.accumulate ? &combine_token<true, Out, T> : &combine_token<false, Out, T>;
  parallel_rows(s.pool(), a.out_TD.dim(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) combine_one(a, t);
  });
}

}  // namespace

void combine(Stream& s, const Combine& a) {
  with_float_type(a.out_TD.dtype, [&]<class Out>(Out) {
    with_float_type(a.y_RD.dtype, [&]<class T>(T) { combine_as<Out, T>(s, a); });
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
