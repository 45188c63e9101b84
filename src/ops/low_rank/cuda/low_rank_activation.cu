// The activation of experts and its derivative, for rows to which an adapter has added its term.
#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// The activation of experts.h and its derivatives.
struct Gated {
  __device__ Gated(const GatedActivation& f, float gate, float up)
      : alpha(f.alpha),
        g(gate > f.limit ? f.limit : gate),
        u((up > f.limit    ? f.limit
           : up < -f.limit ? -f.limit
                           : up) +
          f.shift),
        s(1.0f / (1.0f + expf(-f.alpha * g))),
        gate_counts(!(gate > f.limit)),
        up_counts(!(up > f.limit || up < -f.limit)) {}
  __device__ float value() const { return g * s * u; }
  __device__ float by_gate() const { return gate_counts ? u * s * (1.0f + alpha * g * (1.0f - s)) : 0.0f; }
  __device__ float by_up() const { return up_counts ? g * s : 0.0f; }
  float alpha, g, u, s;
  bool gate_counts, up_counts;
};

// A warp owns a row; a lane kNum neighbouring columns at a time.
struct WarpRow {
  __device__ WarpRow(const int32_t* offsets, int num_experts)
      : row(static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32),
        is_owned(row >= offsets[0] && row < offsets[num_experts]),
        lane(static_cast<int>(threadIdx.x % 32)) {}
  int64_t row;
  bool is_owned;
  int lane;
};

template <int kNum, class T>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(T* a, const T* h, const int32_t* offsets, int num_experts, int64_t F, GatedActivation f) {
  const WarpRow at(offsets, num_experts);
  if (!at.is_owned) return;
  for (int64_t i = at.lane * kNum; i < F; i += 32 * kNum) {
    const auto raw_gate = fetch<kNum>(h + at.row * 2 * F + i), raw_up = fetch<kNum>(h + at.row * 2 * F + F + i);
    float gate[kNum], up[kNum];
    unpack<T>(gate, raw_gate);
    unpack<T>(up, raw_up);
#pragma unroll
    for (int c = 0; c < kNum; ++c) gate[c] = Gated(f, gate[c], up[c]).value();
    store(a + at.row * F + i, gate);
  }
}

template <int kNum, class T>
__global__ void __launch_bounds__(kThreads)
    d_activation_kernel(T* dh, float* dweight, const T* g, const T* h, const float* weight, const int32_t* offsets,
                        int num_experts, int64_t F, GatedActivation f) {
  const WarpRow at(offsets, num_experts);
  if (!at.is_owned) return;
  const float w = weight[at.row];
  float product = 0;
  for (int64_t i = at.lane * kNum; i < F; i += 32 * kNum) {
    const int64_t gate_at = at.row * 2 * F + i, up_at = gate_at + F;
    const auto raw_g = fetch<kNum>(g + at.row * F + i), raw_gate = fetch<kNum>(h + gate_at),
               raw_up = fetch<kNum>(h + up_at);
    const auto raw_dgate = fetch<kNum>(dh + gate_at), raw_dup = fetch<kNum>(dh + up_at);
    float d[kNum], gate[kNum], up[kNum], dgate[kNum], dup[kNum];
    unpack<T>(d, raw_g);
    unpack<T>(gate, raw_gate);
    unpack<T>(up, raw_up);
    unpack<T>(dgate, raw_dgate);
    unpack<T>(dup, raw_dup);
#pragma unroll
    for (int c = 0; c < kNum; ++c) {
      const Gated gated(f, gate[c], up[c]);
      dgate[c] += w * d[c] * gated.by_gate();
      dup[c] += w * d[c] * gated.by_up();
      product += d[c] * rounded<T>(gated.value());  // as expert_up rounded it
    }
    store(dh + gate_at, dgate);
    store(dh + up_at, dup);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) product += __shfl_xor_sync(0xffffffffu, product, lanes);
  if (at.lane == 0) dweight[at.row] += product;
}

// Calls body(the number of neighbouring columns that fill 16 bytes, or 1).
template <class T, class Body>
void with_columns(int64_t F, Body&& body) {
  if (F % kPerVector<T> == 0)
    body(std::integral_constant<int, kPerVector<T>>());
  else
    body(std::integral_constant<int, 1>());
}

unsigned blocks_of(const Tensor& rows) { return static_cast<unsigned>(div_ceil(rows.dim(0), int64_t{kWarps})); }

}  // namespace

void low_rank_activation(Stream& s, const LowRankActivation& a) {
  with_float_type(a.a_RF.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_columns<T>(a.a_RF.dim(1), [&](auto num) {
      activation_kernel<decltype(num)::value><<<blocks_of(a.a_RF), kThreads, 0, cuda_stream(s)>>>(
          a.a_RF.ptr<T>(), a.h_R2F.ptr<T>(), a.offsets_e1.ptr<int32_t>(), static_cast<int>(a.offsets_e1.numel() - 1),
          a.a_RF.dim(1), a.activation);
    });
  });
  check_launch("low_rank_activation");
}

void d_low_rank_activation(Stream& s, const DLowRankActivation& a) {
  with_float_type(a.g_RF.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_columns<T>(a.g_RF.dim(1), [&](auto num) {
      d_activation_kernel<decltype(num)::value><<<blocks_of(a.g_RF), kThreads, 0, cuda_stream(s)>>>(
          a.dh_R2F.ptr<T>(), a.dweight_R.ptr<float>(), a.g_RF.ptr<T>(), a.h_R2F.ptr<T>(), a.weight_R.ptr<float>(),
          a.offsets_e1.ptr<int32_t>(), static_cast<int>(a.offsets_e1.numel() - 1), a.g_RF.dim(1), a.activation);
    });
  });
  check_launch("d_low_rank_activation");
}

}  // namespace moebius::cuda
