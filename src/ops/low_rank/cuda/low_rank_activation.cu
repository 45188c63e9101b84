// The activation of experts, and its derivative, of rows that an adapter has added to. A block owns a
// row at a time.
#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 128;

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

template <class T>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(T* a, const T* h, const int32_t* offsets, int num_experts, int64_t F, GatedActivation f) {
  const int64_t r = blockIdx.x;
  if (r < offsets[0] || r >= offsets[num_experts]) return;
  for (int64_t i = threadIdx.x; i < F; i += kThreads)
    set(a[r * F + i], Gated(f, element(h[r * 2 * F + i]), element(h[r * 2 * F + F + i])).value());
}

// The sum of a row's threads, in an order that does not depend on other rows.
__device__ float sum_of_block(float sum) {
  __shared__ float of_warp[kThreads / 32];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  float all = 0;
  for (int w = 0; w < kThreads / 32; ++w) all += of_warp[w];
  return all;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    d_activation_kernel(T* dh, float* dweight, const T* g, const T* h, const float* weight, const int32_t* offsets,
                        int num_experts, int64_t F, GatedActivation f) {
  const int64_t r = blockIdx.x;
  if (r < offsets[0] || r >= offsets[num_experts]) return;
  float product = 0;
  for (int64_t i = threadIdx.x; i < F; i += kThreads) {
    const Gated gated(f, element(h[r * 2 * F + i]), element(h[r * 2 * F + F + i]));
    const float d = element(g[r * F + i]), da = weight[r] * d;
    T &to_gate = dh[r * 2 * F + i], &to_up = dh[r * 2 * F + F + i];
    set(to_gate, element(to_gate) + da * gated.by_gate());
    set(to_up, element(to_up) + da * gated.by_up());
    T a;
    set(a, gated.value());  // as expert_up rounded it
    product += d * element(a);
  }
  const float sum = sum_of_block(product);
  if (threadIdx.x == 0) dweight[r] += sum;
}

}  // namespace

void low_rank_activation(Stream& s, const LowRankActivation& a) {
  with_float_type(a.a_RF.dtype, [&](auto zero) {
    using T = decltype(zero);
    activation_kernel<T><<<static_cast<unsigned>(a.a_RF.dim(0)), kThreads, 0, cuda_stream(s)>>>(
        a.a_RF.ptr<T>(), a.h_R2F.ptr<T>(), a.offsets_e1.ptr<int32_t>(), static_cast<int>(a.offsets_e1.numel() - 1),
        a.a_RF.dim(1), a.activation);
  });
  check_launch("low_rank_activation");
}

void d_low_rank_activation(Stream& s, const DLowRankActivation& a) {
  with_float_type(a.g_RF.dtype, [&](auto zero) {
    using T = decltype(zero);
    d_activation_kernel<T><<<static_cast<unsigned>(a.g_RF.dim(0)), kThreads, 0, cuda_stream(s)>>>(
        a.dh_R2F.ptr<T>(), a.dweight_R.ptr<float>(), a.g_RF.ptr<T>(), a.h_R2F.ptr<T>(), a.weight_R.ptr<float>(),
        a.offsets_e1.ptr<int32_t>(), static_cast<int>(a.offsets_e1.numel() - 1), a.g_RF.dim(1), a.activation);
  });
  check_launch("d_low_rank_activation");
}

}  // namespace moebius::cuda
