// dq, dk and dv of bf16 on sm_90a in one kernel, and the rounding of dq; attention_fused_bwd.h says how.
#include <algorithm>

#include "ops/attention/sm90/attention_fused_narrow.h"
#include "ops/attention/sm90/attention_fused_wide.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

template <class Shape>
__global__ void __launch_bounds__(kSm90Threads, 1)
    fused_kernel(const __grid_constant__ BwdMaps maps, T* dk, T* dv, RowSums sums, FusedSlice f, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(raw);
  if (threadIdx.x < 32) {
    const int ticket = __shfl_sync(~0u, threadIdx.x == 0 ? atomicAdd(f.tickets, 1) : 0, 0);
    const FusedWork w = work_of_ticket(f, z, ticket);
    const int64_t begin = first_tile<Shape>(z, w.key), key_end = min(int64_t{w.key} + Shape::kKeys, z.kv_rows),
                  rows_end = seen_end(z, w.b, begin * Shape::kRows, key_end);
    if (threadIdx.x == 0) {
      shared.ticket = ticket;
      shared.end_tile = static_cast<int>(max(begin, (rows_end + Shape::kRows - 1) / Shape::kRows));
      mbarrier_init(smem_addr(&shared.keys_full), 1);
      for (int i = 0; i < Shape::kStages; ++i) {
        mbarrier_init(smem_addr(&shared.full[i]), 33);
        mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
      }
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(smem_addr(&shared.ds_full[i]), kConsumerWarps);
        mbarrier_init(smem_addr(&shared.ds_empty[i]), kConsumerWarps);
        for (int j = 0; j < Shape::kDqStages; ++j) {
          mbarrier_init(smem_addr(&shared.dq_full[i][j]), kConsumerWarps / 2);
          mbarrier_init(smem_addr(&shared.dq_empty[i][j]), 1);
        }
      }
      fence_mbarrier_init();
    }
  }
  __syncthreads();
  const FusedWork w = work_of_ticket(f, z, shared.ticket);
  const FusedWalk walk{.begin = static_cast<int>(first_tile<Shape>(z, w.key)),
                       .end = shared.end_tile,
                       .heads = z.heads / z.kv_heads,
                       .heads_outer = f.heads_outer};
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0)
      load_queries<Shape>(shared, maps, sums, z, w, walk);
    else if (warp < 3 && threadIdx.x % 32 == 0)
      add_dq<Shape>(shared, f, z, w, walk, warp - 1);
  } else {
    more_registers<kConsumerRegisters>();
    if constexpr (Shape::kPieces == 1)
      multiply_narrow<Shape>(shared, dk, dv, z, w, walk);
    else
      multiply_wide<Shape>(shared, dk, dv, z, w, walk);
  }
}

// dq = scale times its sums, of a tile of queries and a head. A warpgroup has a half of the tile.
template <class Shape>
__global__ void __launch_bounds__(256) round_dq_kernel(T* dq, FusedSlice f, AttentionSizes z) {
  const int heads = z.heads / z.kv_heads, tile = blockIdx.x, head = blockIdx.y, group = f.first + blockIdx.z;
  const int half = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int b = group / z.kv_heads, h = group % z.kv_heads * heads + head;
  const int64_t row = int64_t{tile} * Shape::kRows, last_row = z.shift + row + Shape::kRows - 1,
                last_block = last_row < 0 ? -1 : (last_row < z.kv_rows ? last_row : z.kv_rows - 1) / Shape::kKeys;
  const int64_t first = first_key(z, b, row);
  const bool is_seen = first < z.kv_rows && first / Shape::kKeys <= last_block;
  const auto* const from =
      reinterpret_cast<const float4*>(f.dq + (((int64_t{blockIdx.z} * heads + head) * f.tiles + tile) * 2 + half) *
                                                 Shape::kHalfFloats) +
      thread;
  float4 sums[Shape::kParts][4];
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[part][j] = is_seen ? from[(4 * part + j) * kGroupThreads] : float4{0, 0, 0, 0};
  // Four lanes have a row: lane c gets chunk c of the 8 columns of each part from words c of all of them.
  const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part) {
    const DqPart at = Shape::part(half, part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 y = sums[part][j];
        x[j] = i == 0 ? pack_bf16(y.x * z.scale, y.y * z.scale) : pack_bf16(y.z * z.scale, y.w * z.scale);
      }
      // Transposes 4 x 4 words of 4 lanes in two exchanges.
      const uint32_t a0 = c & 1 ? x[0] : x[1], a1 = c & 1 ? x[2] : x[3];
      const uint32_t b0 = __shfl_xor_sync(~0u, a0, 1), b1 = __shfl_xor_sync(~0u, a1, 1);
      if (c & 1)
        x[0] = b0, x[2] = b1;
      else
        x[1] = b0, x[3] = b1;
      const uint32_t c0 = c & 2 ? x[0] : x[2], c1 = c & 2 ? x[1] : x[3];
      const uint32_t d0 = __shfl_xor_sync(~0u, c0, 2), d1 = __shfl_xor_sync(~0u, c1, 2);
      if (c & 2)
        x[0] = d0, x[1] = d1;
      else
        x[2] = d0, x[3] = d1;
      const int64_t r = row + at.row + thread / 32 * 16 + lane / 4 + 8 * i;
      if (r < z.rows)
        *reinterpret_cast<uint4*>(dq + ((b * z.rows + r) * z.heads + h) * Shape::kWidth + at.column + c * 8) = {
            x[0], x[1], x[2], x[3]};
    }
  }
}

template <class Shape>
void launch(Stream& s, const AttentionBwd& a, const RowSums& sums, const FusedPlan& plan, void* scratch) {
  const AttentionSizes z = attention_sizes(a);
  constexpr int kBytes = sizeof(typename Shape::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(fused_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const cudaStream_t stream = cuda_stream(s);
  const BwdMaps maps = bwd_maps(a, Shape::kRows, Shape::kKeys);
  auto *const dq = static_cast<T*>(a.dq_THd.data), *const dk = static_cast<T*>(a.dk_TGd.data),
              *const dv = static_cast<T*>(a.dv_TGd.data);
  const int heads = z.heads / z.kv_heads, groups = narrow<int>(a.batch * z.kv_heads);
  FusedSlice f{.dq = static_cast<float*>(scratch),
               .key_blocks = narrow<int>(div_ceil(z.kv_rows, Shape::kKeys)),
               .tiles = narrow<int>(div_ceil(z.rows, Shape::kRows)),
               .heads_outer = z.window > 0};
  f.tickets = reinterpret_cast<int*>(static_cast<unsigned char*>(scratch) + plan.dq_bytes);
  f.added = f.tickets + 1;
  for (f.first = 0; f.first < groups; f.first += f.groups) {
    f.groups = std::min(narrow<int>(plan.groups_of_slice), groups - f.first);
    f.wave = std::min(narrow<int>(plan.wave), f.groups);
    MOEBIUS_CUDA(cudaMemsetAsync(f.tickets, 0, plan.counter_bytes, stream));
    fused_kernel<Shape><<<f.groups * f.key_blocks, kSm90Threads, kBytes, stream>>>(maps, dk, dv, sums, f, z);
    check_launch("attention_bwd");
    round_dq_kernel<Shape><<<dim3(f.tiles, heads, f.groups), 256, 0, stream>>>(dq, f, z);
    check_launch("attention_bwd");
  }
}

}  // namespace

void sm90_fused_bwd(Stream& s, const AttentionBwd& a, const RowSums& sums, const FusedPlan& plan, void* scratch) {
  const int64_t width = a.q_THd.dim(2);
  if (width == 64)
    launch<FusedShape<64>>(s, a, sums, plan, scratch);
  else if (width == 128)
    launch<FusedShape<128>>(s, a, sums, plan, scratch);
  else
    launch<FusedShape<192>>(s, a, sums, plan, scratch);
}

}  // namespace moebius::cuda
