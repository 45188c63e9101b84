// The norm of one row at the beginning of a kernel whose blocks all need it: each block computes it, with the bits of
// rms_norm_fwd, and leaves it in shared memory. One block also writes it to the results of the norm.
#pragma once

#include "ops/norm/cuda/norm_row.h"
#include "ops/one_token/sm90/weight_stream.h"

namespace moebius::cuda::sm90 {

constexpr int kNormVectors = 32 / kPerVector<bf16>;  // of a lane, as in rms_norm_fwd
constexpr int kMaxPrologueWidth = 32 * kStreamMultiplying;

// The norm on the first `lanes` of the kStreamMultiplying threads that call it.
class NormPrologue {
 public:
  // Loads the weights, before the inputs are there.
  __device__ __forceinline__ NormPrologue(const NormRowsFwd<bf16>& a, int lanes) : a_(a), lanes_(lanes) {
#pragma unroll
    for (int v = 0; v < kNormVectors; ++v) w_[v] = fetch<8>(a.w + column(v), is_inside(v));
  }
  // Writes the row to x, in shared memory. sums: kStreamWarps numbers of it. Ends with a barrier of the threads.
  __device__ __forceinline__ void run(uint4* x, float* sums, bool stores) const {
    Raw<bf16, 8> raw[kNormVectors], residual[kNormVectors];
#pragma unroll
    for (int v = 0; v < kNormVectors; ++v) {
      raw[v].words[0] = is_inside(v) ? load_activations(a_.x + column(v)) : uint4{};
      residual[v].words[0] = a_.residual && is_inside(v) ? load_activations(a_.residual + column(v)) : uint4{};
    }
    float squares = 0;
#pragma unroll
    for (int v = 0; v < kNormVectors; ++v) {
      float row[8], term[8];
      unpack<bf16>(row, raw[v]);
      unpack<bf16>(term, residual[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (a_.residual) row[i] = rounded<bf16>(row[i] + term[i]);
        squares += row[i] * row[i];
      }
      raw[v] = pack<bf16>(row);  // exact, and half the registers
      if (stores && a_.residual && is_inside(v)) *reinterpret_cast<uint4*>(a_.sum + column(v)) = raw[v].words[0];
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    named_barrier_sync(kMultiplyingBarrier, kStreamMultiplying);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float total = warp_sum(lane < lanes_ / 32 ? sums[lane] : 0.0f);
    const float rstd = 1.0f / sqrtf(total / static_cast<float>(a_.width) + a_.eps);
    if (stores && threadIdx.x == 0) a_.rstd[0] = rstd;
#pragma unroll
    for (int v = 0; v < kNormVectors; ++v) {
      if (!is_inside(v)) continue;
      float row[8], y[8];
      unpack<bf16>(row, raw[v]);
      unpack<bf16>(y, w_[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= rounded<bf16>(row[i] * rstd);
      const Raw<bf16, 8> words = pack<bf16>(y);
      x[column(v) / 8] = words.words[0];
      if (stores) *reinterpret_cast<uint4*>(a_.y + column(v)) = words.words[0];
    }
    named_barrier_sync(kMultiplyingBarrier, kStreamMultiplying);
  }

 private:
  __device__ __forceinline__ int column(int v) const { return (v * lanes_ + static_cast<int>(threadIdx.x)) * 8; }
  __device__ __forceinline__ bool is_inside(int v) const {
    return static_cast<int>(threadIdx.x) < lanes_ && column(v) < a_.width;
  }

  const NormRowsFwd<bf16>& a_;
  int lanes_;
  Raw<bf16, 8> w_[kNormVectors];
};

// Returns the arguments of the norm of one row. REQUIRES: takes_prologue(a).
inline NormRowsFwd<bf16> norm_args(const RmsNormFwd& a) {
  const bool residual = !a.residual_TD.empty();
  const int64_t width = a.x_TD.dim(1);
  return {.y = a.y_TD.ptr<bf16>(),
          .sum = residual ? a.sum_TD.ptr<bf16>() : nullptr,
          .rstd = a.rstd_T.ptr<float>(),
          .x = a.x_TD.ptr<bf16>(),
          .residual = residual ? a.residual_TD.ptr<bf16>() : nullptr,
          .w = a.w_D.ptr<bf16>(),
          .rows = 1,
          .width = width,
          .eps = a.eps};
}

// Returns whether a kernel may begin with this norm. A result must not replace what other blocks still read.
inline bool takes_prologue(const RmsNormFwd& a) {
  const auto is_input = [&](const Tensor& t) { return t.data == a.x_TD.data || t.data == a.residual_TD.data; };
  if (a.x_TD.dtype != DType::bf16 || a.x_TD.dim(0) != 1 || a.x_TD.dim(1) > kMaxPrologueWidth) return false;
  if (is_input(a.y_TD) || (!a.residual_TD.empty() && is_input(a.sum_TD))) return false;
  return rows_are_aligned(a.x_TD.dim(1), 2, a.y_TD.data, a.x_TD.data, a.residual_TD.data, a.sum_TD.data, a.w_D.data);
}

}  // namespace moebius::cuda::sm90
