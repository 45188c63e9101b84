#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

// A warp is a row; 4 rows of a head after another share a line of the outputs.
template <int kValues>
__global__ void __launch_bounds__(256)
    row_sums_kernel(RowSums out, const T* dout, const T* o, const float* lse, AttentionSizes z) {
  constexpr int kPer = kValues / 32;
  const int lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32, b = blockIdx.z;
  const int h = blockIdx.y;
  if (row >= z.rows) return;
  const int64_t at = (b * z.rows + row) * z.heads + h;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; i += 2) {
    const int c = lane * kPer + i;
    const auto x = *reinterpret_cast<const uint32_t*>(dout + at * kValues + c),
               y = *reinterpret_cast<const uint32_t*>(o + at * kValues + c);
    sum += low_bf16(x) * low_bf16(y) + high_bf16(x) * high_bf16(y);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0) return;
  const int64_t to = (b * z.heads + h) * z.rows + row;
  out.delta[to] = sum;
  out.lse2[to] = lse[at] * kLog2E;
}

template <int kValues>
void launch_row_sums(Stream& s, const AttentionBwd& a, const RowSums& sums) {
  const AttentionSizes z = attention_sizes(a);
  const dim3 blocks(static_cast<unsigned>(div_ceil(z.rows, 8)), z.heads, static_cast<unsigned>(a.batch));
  row_sums_kernel<kValues><<<blocks, 256, 0, cuda_stream(s)>>>(
      sums, static_cast<const T*>(a.do_THd.data), static_cast<const T*>(a.o_THd.data), a.lse_TH.ptr<float>(), z);
  check_launch("attention_bwd");
}

DsSizes ds_sizes(const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  return {.batch = a.batch,
          .rows = z.rows,
          .heads = z.heads,
          .kv_heads = z.kv_heads,
          .width = z.width,
          .v_width = z.v_width,
          .window = z.window,
          .has_documents = !a.doc_start_T.empty(),
          .is_part = a.is_part};
}

AttentionBwdPath path_of(const AttentionBwd& a) {
  const DsSizes z = ds_sizes(a);
  if (a.path == AttentionBwdPath::chosen) return bwd_path(z);
  MOEBIUS_CHECK(usage, can_take(z, a.path),
                "attention_bwd: the path that was asked for has no bounded scratch for q {} in {} sequences; leave "
                "the path out",
                to_string(a.q_THd), a.batch);
  return a.path;
}

// Returns the scratch of a path beside the sums of rows.
int64_t path_bytes(const DsSizes& z, AttentionBwdPath path) {
  if (path == AttentionBwdPath::one_kernel) return fused_plan(z, kMaxDqBytes, kMaxDsBytes).bytes();
  return path == AttentionBwdPath::kept_ds ? ds_plan(z, kMaxDsBytes).bytes() : 0;
}

int64_t sums_bytes(const AttentionBwd& a) { return div_ceil(2 * a.lse_TH.num_bytes(), 256) * 256; }

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
  unsigned char *const tiles = static_cast<unsigned char*>(a.scratch.data) + sums_bytes(a),
                       *const kv_sums = tiles + plan.ds_bytes, *const q_parts = kv_sums + plan.kv_sums_bytes;
  for (const DsSlice& slice : plan.slices) {
    DsTiles ds = tiles_of(z, slice);
    ds.tiles = tiles;
    if (plan.cuts_queries) {
      ds.kv_sums = reinterpret_cast<float4*>(kv_sums);
      ds.parts = narrow<int>(dq_parts(z, slice));
      ds.q_parts = reinterpret_cast<float*>(q_parts);
    }
    sm90_dkv(s, a, sums, ds);
    sm90_dq_of_ds(s, a, ds);
  }
}

}  // namespace

int64_t sm90_scratch_bytes(const AttentionBwd& a) { return sums_bytes(a) + path_bytes(ds_sizes(a), path_of(a)); }

void sm90_attention_bwd(Stream& s, const AttentionBwd& a) {
  auto* const lse2 = static_cast<float*>(a.scratch.data);
  const RowSums sums{lse2, lse2 + a.lse_TH.numel()};
  if (a.v_TGd.dim(2) == 64)
    launch_row_sums<64>(s, a, sums);
  else
    launch_row_sums<128>(s, a, sums);
  const DsSizes z = ds_sizes(a);
  AttentionBwdPath path = path_of(a);
  // With scratch for the sums of rows alone nothing is kept: where other kernels were to take the call.
  if (a.scratch.num_bytes() < sums_bytes(a) + path_bytes(z, path)) path = AttentionBwdPath::recomputed;
  if (path == AttentionBwdPath::one_kernel)
    return sm90_fused_bwd(s, a, sums, fused_plan(z, kMaxDqBytes, kMaxDsBytes),
                          static_cast<unsigned char*>(a.scratch.data) + sums_bytes(a));
  if (path == AttentionBwdPath::kept_ds) return launch_slices(s, a, sums);
  sm90_dkv(s, a, sums, {.sequences = static_cast<int>(a.batch), .kv_heads = narrow<int>(a.k_TGd.dim(1))});
  sm90_dq(s, a, sums);
}

}  // namespace moebius::cuda
