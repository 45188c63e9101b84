#include <algorithm>

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

// Sequences, or kv heads of one, whose ds is kept at a time; none: it is not.
struct Slice {
  int64_t sequences = 0, kv_heads = 0;
};

constexpr int64_t kMaxDsBytes = int64_t{1280} << 20;
// A slice is a kernel of its own, and is to fill a GPU: blocks of dkv of which the long ones are
// overlapped with others.
constexpr int64_t kMinBlocks = 256, kKeysOfBlock = 128;

// The tiles of ds of one head, without an address.
DsTiles ds_tiles(const AttentionSizes& z) {
  const auto tiles = narrow<int>(div_ceil(z.rows, kDsEdge));
  const int64_t seen = z.window > 0 ? div_ceil(z.window - 1, kDsEdge) + 1 : tiles;
  DsTiles ds{.group = z.heads / z.kv_heads, .band = static_cast<int>(std::min<int64_t>(seen, tiles))};
  ds.tiles_of_head = ds.first_of(tiles);
  return ds;
}
int64_t ds_bytes_of_kv_head(const AttentionSizes& z) {
  return z.heads / z.kv_heads * ds_tiles(z).tiles_of_head * kDsTileBytes;
}

// In slices of one size, but for the last.
int64_t even_slice(int64_t all, int64_t at_most) { return div_ceil(all, div_ceil(all, at_most)); }

Slice slice_of(const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  if (a.is_part || z.width == 192 || z.rows == 0) return {};
  const int64_t fit = kMaxDsBytes / ds_bytes_of_kv_head(z), all = a.batch * z.kv_heads;
  if (fit < std::min(all, div_ceil(kMinBlocks, div_ceil(z.rows, kKeysOfBlock)))) return {};
  // Blocks of any length in any order: a slice would end with few of them.
  if (!a.doc_start_T.empty() && fit < all) return {};
  if (fit >= z.kv_heads) return {even_slice(a.batch, fit / z.kv_heads), z.kv_heads};
  return {1, even_slice(z.kv_heads, fit)};
}

int64_t sums_bytes(const AttentionBwd& a) { return div_ceil(2 * a.lse_TH.num_bytes(), 256) * 256; }

// dq of one slice after the other, right after its ds.
void launch_slices(Stream& s, const AttentionBwd& a, const RowSums& sums, const Slice& slice) {
  const AttentionSizes z = attention_sizes(a);
  DsTiles ds = ds_tiles(z);
  ds.tiles = static_cast<unsigned char*>(a.scratch.data) + sums_bytes(a);
  for (int64_t b = 0; b < a.batch; b += slice.sequences) {
    for (int64_t g = 0; g < z.kv_heads; g += slice.kv_heads) {
      ds.b = static_cast<int>(b);
      ds.kv_head = static_cast<int>(g);
      ds.sequences = static_cast<int>(std::min(slice.sequences, a.batch - b));
      ds.kv_heads = static_cast<int>(std::min(slice.kv_heads, z.kv_heads - g));
      sm90_dkv(s, a, sums, ds);
      sm90_dq_of_ds(s, a, ds);
    }
  }
}

}  // namespace

int64_t sm90_scratch_bytes(const AttentionBwd& a) {
  const Slice slice = slice_of(a);
  if (slice.sequences == 0) return sums_bytes(a);
  return sums_bytes(a) + slice.sequences * slice.kv_heads * ds_bytes_of_kv_head(attention_sizes(a));
}

void sm90_attention_bwd(Stream& s, const AttentionBwd& a) {
  auto* const lse2 = static_cast<float*>(a.scratch.data);
  const RowSums sums{lse2, lse2 + a.lse_TH.numel()};
  if (a.v_TGd.dim(2) == 64)
    launch_row_sums<64>(s, a, sums);
  else
    launch_row_sums<128>(s, a, sums);
  // With scratch for the sums alone ds is not kept: where other kernels were to take the call.
  const Slice slice = a.scratch.num_bytes() < sm90_scratch_bytes(a) ? Slice{} : slice_of(a);
  if (slice.sequences > 0) return launch_slices(s, a, sums, slice);
  sm90_dkv(s, a, sums, {.sequences = static_cast<int>(a.batch), .kv_heads = narrow<int>(a.k_TGd.dim(1))});
  sm90_dq(s, a, sums);
}

}  // namespace moebius::cuda
