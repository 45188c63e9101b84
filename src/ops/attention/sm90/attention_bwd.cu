#include "ops/attention/sm90/attention_bwd.h"

#include "ops/attention/attention_scratch.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

__device__ __forceinline__ float dot_of_8(const uint4& x, const uint4& y) {
  float sum = low_bf16(x.x) * low_bf16(y.x) + high_bf16(x.x) * high_bf16(y.x);
  sum += low_bf16(x.y) * low_bf16(y.y) + high_bf16(x.y) * high_bf16(y.y);
  sum += low_bf16(x.z) * low_bf16(y.z) + high_bf16(x.z) * high_bf16(y.z);
  return sum + (low_bf16(x.w) * low_bf16(y.w) + high_bf16(x.w) * high_bf16(y.w));
}

// A block has 16 rows of 16 heads, so that it reads 16 heads of a row in one piece and writes 16 rows of a head so. 8
// or 16 lanes have a row of a head. A lane has 8 values at a time.
template <int kValues>
__global__ void __launch_bounds__(256)
    row_sums_kernel(RowSums out, const T* dout, const T* o, const float* lse, AttentionSizes z) {
  constexpr int kLanes = kValues == 64 ? 8 : 16, kRows = 16, kHeads = 16, kAtOnce = 256 / kLanes / kHeads;
  __shared__ float sums[kHeads][kRows];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, first_h = blockIdx.y * kHeads;
  const int64_t first_row = blockIdx.x * int64_t{kRows}, begin = blockIdx.z * z.rows;
  const int h = first_h + group % kHeads;
#pragma unroll 4
  for (int r = group / kHeads; r < kRows; r += kAtOnce) {
    float sum = 0;
    if (first_row + r < z.rows && h < z.heads) {
      const int64_t at = ((begin + first_row + r) * z.heads + h) * kValues;
#pragma unroll
      for (int i = lane * 8; i < kValues; i += kLanes * 8) {
        const float dot =
            dot_of_8(*reinterpret_cast<const uint4*>(dout + at + i), *reinterpret_cast<const uint4*>(o + at + i));
        sum = i == lane * 8 ? dot : sum + dot;
      }
    }
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane == 0) sums[group % kHeads][r] = sum;
  }
  __syncthreads();
  const int my_row = threadIdx.x % kRows, my_head = threadIdx.x / kRows;
  const int64_t row = first_row + my_row;
  if (row >= z.rows || first_h + my_head >= z.heads) return;
  const int64_t to = (int64_t{blockIdx.z} * z.heads + first_h + my_head) * z.rows + row;
  out.delta[to] = sums[my_head][my_row];
  out.lse2[to] = lse[(begin + row) * z.heads + first_h + my_head] * kLog2E;
}

template <int kValues>
void launch_row_sums(Stream& s, const AttentionBwd& a, const RowSums& sums) {
  const AttentionSizes z = attention_sizes(a);
  const dim3 blocks(static_cast<unsigned>(div_ceil(z.rows, 16)), static_cast<unsigned>(div_ceil(z.heads, 16)),
                    static_cast<unsigned>(a.batch));
  row_sums_kernel<kValues><<<blocks, 256, 0, cuda_stream(s)>>>(
      sums, static_cast<const T*>(a.do_THd.data), static_cast<const T*>(a.o_THd.data), a.lse_TH.ptr<float>(), z);
  check_launch("attention_bwd");
}

DsTiles tiles_of(const DsSizes& z, const DsSlice& slice) {
  const int64_t end = slice.query_tile + slice.query_tiles;
  return {.b = narrow<int>(slice.sequence),
          .kv_head = narrow<int>(slice.kv_head),
          .sequences = narrow<int>(slice.sequences),
          .kv_heads = narrow<int>(slice.kv_heads),
          .group = narrow<int>(z.heads / z.kv_heads),
          .band = narrow<int>(z.band()),
          .query_begin = narrow<int>(slice.query_tile),
          .query_end = narrow<int>(end),
          .skipped = z.tiles_before(slice.query_tile),
          .tiles_of_head = z.tiles_before(end) - z.tiles_before(slice.query_tile)};
}

// dq of one slice after the other, right after its ds.
void launch_slices(Stream& s, const AttentionBwd& a, const RowSums& sums) {
  const DsSizes z = ds_sizes(a);
  const DsPlan plan = ds_plan(z, kMaxDsBytes);
  unsigned char *const tiles = static_cast<unsigned char*>(a.scratch.data) + sm90_sums_bytes(a),
                       *const kv_sums = tiles + plan.ds_bytes, *const q_parts = kv_sums + plan.kv_sums_bytes;
  for (const DsSlice& slice : plan.slices) {
    DsTiles ds = tiles_of(z, slice);
    ds.tiles = tiles;
    if (plan.cuts_queries) {
      ds.kv_sums = reinterpret_cast<float4*>(kv_sums);
      ds.parts = narrow<int>(dq_parts(z, slice));
      ds.q_parts = reinterpret_cast<float*>(q_parts);
    }
    if (z.width == 256) {
      sm90_dv_and_ds(s, a, sums, ds);
      sm90_dk_of_ds(s, a, ds);
    } else {
      sm90_dkv(s, a, sums, ds);
    }
    sm90_dq_of_ds(s, a, ds);
  }
}

}  // namespace

void sm90_attention_bwd(Stream& s, const AttentionBwd& a) {
  auto* const lse2 = static_cast<float*>(a.scratch.data);
  const RowSums sums{lse2, lse2 + a.lse_TH.numel()};
  const int64_t v_width = a.v_TGd.dim(2);
  if (v_width == 64)
    launch_row_sums<64>(s, a, sums);
  else if (v_width == 96)
    launch_row_sums<96>(s, a, sums);
  else if (v_width == 256)
    launch_row_sums<256>(s, a, sums);
  else
    launch_row_sums<128>(s, a, sums);
  const DsSizes z = ds_sizes(a);
  const AttentionBwdPath path = sm90_path(a);
  if (path == AttentionBwdPath::one_kernel)
    return sm90_fused_bwd(s, a, sums, fused_plan(z, kMaxDqBytes, kMaxDsBytes),
                          static_cast<unsigned char*>(a.scratch.data) + sm90_sums_bytes(a));
  if (path == AttentionBwdPath::kept_ds) return launch_slices(s, a, sums);
  sm90_dkv(s, a, sums, {.sequences = static_cast<int>(a.batch), .kv_heads = narrow<int>(a.k_TGd.dim(1))});
  sm90_dq(s, a, sums);
}

}  // namespace moebius::cuda
