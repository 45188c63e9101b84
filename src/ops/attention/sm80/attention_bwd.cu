#include "ops/attention/sm80/attention_bwd.h"

namespace moebius::cuda {
namespace sm80 {
namespace {

constexpr int kThreads = 256, kLanes = 8, kRows = kThreads / kLanes;  // threads and rows of a block, lanes of a row

__device__ __forceinline__ float product_of_pairs(uint32_t x, uint32_t y) {
  return low_of(x) * low_of(y) + high_of(x) * high_of(y);
}

// Returns the dot product of 8 columns, of which `columns` exist.
__device__ __forceinline__ float product(const Half* x, const Half* y, int columns, bool has_chunks) {
  float sum = 0;
  if (has_chunks) {
    const auto a = *reinterpret_cast<const uint4*>(x), b = *reinterpret_cast<const uint4*>(y);
    return product_of_pairs(a.x, b.x) + product_of_pairs(a.y, b.y) + product_of_pairs(a.z, b.z) +
           product_of_pairs(a.w, b.w);
  }
  for (int c = 0; c < min(columns, 8); ++c) sum += __bfloat162float(x[c]) * __bfloat162float(y[c]);
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(RowSums out, Operand dout, Operand o, const float* lse, AttentionSizes z) {
  const int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.x / kLanes, b = blockIdx.z;
  const int h = blockIdx.y, lane = threadIdx.x % kLanes, width = z.v_width;
  const int64_t at = (b * z.rows + row) * z.heads + h;
  float sum = 0;
  for (int c = 8 * lane; c < width && row < z.rows; c += 8 * kLanes)
    sum += product(dout.data + at * width + c, o.data + at * width + c, width - c, dout.has_chunks && o.has_chunks);
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0 || row >= z.rows) return;
  const int64_t to = (b * z.heads + h) * z.rows + row;
  out.delta[to] = sum;
  out.lse2[to] = lse[at] * kLog2E;
}

}  // namespace
}  // namespace sm80

void sm80_attention_bwd(Stream& s, const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  auto* const lse2 = static_cast<float*>(a.scratch.data);
  const sm80::BwdParams p{.q = sm80::operand(a.q_THd),
                          .k = sm80::operand(a.k_TGd),
                          .v = sm80::operand(a.v_TGd),
                          .dout = sm80::operand(a.do_THd),
                          .dq = sm80::result(a.dq_THd),
                          .dk = sm80::result(a.dk_TGd),
                          .dv = sm80::result(a.dv_TGd),
                          .sums = {lse2, lse2 + a.lse_TH.numel()},
                          .z = z};
  const dim3 blocks(static_cast<unsigned>(div_ceil(z.rows, sm80::kRows)), z.heads, static_cast<unsigned>(a.batch));
  sm80::row_sums_kernel<<<blocks, sm80::kThreads, 0, cuda_stream(s)>>>(p.sums, p.dout, sm80::operand(a.o_THd),
                                                                       a.lse_TH.ptr<float>(), z);
  check_launch("attention_bwd");
  sm80::launch_dkv(s, a, p);
  sm80::launch_dq(s, a, p);
}

}  // namespace moebius::cuda
