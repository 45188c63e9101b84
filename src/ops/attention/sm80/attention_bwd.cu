#include "ops/attention/sm80/attention_bwd.h"

namespace moebius::cuda {
namespace sm80 {
namespace {

constexpr int kWarps = 8;  // of a block

// A warp is a row of a head.
__global__ void __launch_bounds__(32 * kWarps)
    row_sums_kernel(RowSums out, const Half* dout, const Half* o, const float* lse, AttentionSizes z) {
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32, b = blockIdx.z;
  const int h = blockIdx.y;
  if (row >= z.rows) return;
  const int64_t at = (b * z.rows + row) * z.heads + h, width = z.v_width;
  float sum = 0;
  for (int c = threadIdx.x % 32; c < width; c += 32)
    sum += __bfloat162float(dout[at * width + c]) * __bfloat162float(o[at * width + c]);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (threadIdx.x % 32 != 0) return;
  const int64_t to = (b * z.heads + h) * z.rows + row;
  out.delta[to] = sum;
  out.lse2[to] = lse[at] * kLog2E;
}

}  // namespace
}  // namespace sm80

int64_t sm80_scratch_bytes(const AttentionBwd& a) { return 2 * a.lse_TH.num_bytes(); }

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
  const dim3 blocks(static_cast<unsigned>(div_ceil(z.rows, sm80::kWarps)), z.heads, static_cast<unsigned>(a.batch));
  sm80::row_sums_kernel<<<blocks, 32 * sm80::kWarps, 0, cuda_stream(s)>>>(
      p.sums, p.dout.data, static_cast<const sm80::Half*>(a.o_THd.data), a.lse_TH.ptr<float>(), z);
  check_launch("attention_bwd");
  sm80::launch_dkv(s, a, p);
  sm80::launch_dq(s, a, p);
}

}  // namespace moebius::cuda
