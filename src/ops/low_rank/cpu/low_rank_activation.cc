// The activation of experts and its derivative, for rows to which an adapter has added its term.
#include <algorithm>

#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"
#include "ops/experts/cpu/gated_activation.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kGrain = 16;  // rows of a task

// Calls fn(r) for the rows of all experts.
template <class F>
void for_each_row(Stream& s, const Tensor& offsets_e1, F&& fn) {
  const int32_t* offsets = offsets_e1.ptr<int32_t>();
  const int64_t first = offsets[0], count = offsets[offsets_e1.numel() - 1] - first;
  parallel_rows(s.pool(), count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = first + begin; r < first + end; ++r) fn(r);
  });
}

template <class T>
void activate_row(const LowRankActivation& a, int64_t r) {
  const int64_t F = a.a_RF.dim(1);
  const T* h = a.h_R2F.ptr<T>() + r * 2 * F;
  T* to = a.a_RF.ptr<T>() + r * F;
  for (int64_t f = 0; f < F; f += kNumLanes) {
    const int64_t n = std::min(kNumLanes, F - f);
    store_lanes(to + f, Gated(a.activation, load_lanes(h + f, n), load_lanes(h + F + f, n)).value(), n);
  }
}

template <class T>
void backward_row(const DLowRankActivation& a, int64_t r) {
  const int64_t F = a.g_RF.dim(1);
  const T *h = a.h_R2F.ptr<T>() + r * 2 * F, *g_row = a.g_RF.ptr<T>() + r * F;
  T* dh = a.dh_R2F.ptr<T>() + r * 2 * F;
  const float weight = a.weight_R.ptr<float>()[r];
  Lanes product = {};
  for (int64_t f = 0; f < F; f += kNumLanes) {
    const int64_t n = std::min(kNumLanes, F - f);
    const Lanes g = load_lanes(g_row + f, n), da = weight * g;
    const Gated gated(a.activation, load_lanes(h + f, n), load_lanes(h + F + f, n));
    store_lanes(dh + f, load_lanes(dh + f, n) + da * gated.by_gate(), n);
    store_lanes(dh + F + f, load_lanes(dh + F + f, n) + da * gated.by_up(), n);
    product += g * round_lanes<T>(gated.value());  // as expert_up rounded it
  }
  a.dweight_R.ptr<float>()[r] += sum_lanes(product);
}

}  // namespace

void low_rank_activation(Stream& s, const LowRankActivation& a) {
  with_float_type(a.a_RF.dtype,
                  [&]<class T>(T) { for_each_row(s, a.offsets_e1, [&](int64_t r) { activate_row<T>(a, r); }); });
}

void d_low_rank_activation(Stream& s, const DLowRankActivation& a) {
  with_float_type(a.g_RF.dtype,
                  [&]<class T>(T) { for_each_row(s, a.offsets_e1, [&](int64_t r) { backward_row<T>(a, r); }); });
}

}  // namespace moebius::cpu
