// dq, dk and dv of bf16 on sm_90a in one kernel; attention_fused_bwd.h says how.
#include <algorithm>

#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/sm90/attention_fused_narrow.h"
#include "ops/attention/sm90/attention_fused_wide.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

template <class Shape>
__device__ void init_barriers(typename Shape::Shared& shared) {
  for (uint64_t* barrier : {&shared.keys_full, &shared.values_full}) mbarrier_init(smem_addr(barrier), 1);
  for (uint64_t* barrier : {&shared.keys_empty, &shared.values_empty})
    mbarrier_init(smem_addr(barrier), kConsumerWarps);
  for (int i = 0; i < Shape::kStages; ++i) {
    mbarrier_init(smem_addr(&shared.full[i]), 33);
    mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
  }
  for (int i = 0; i < 2; ++i) {
    mbarrier_init(smem_addr(&shared.work_full[i]), 1);
    mbarrier_init(smem_addr(&shared.work_empty[i]), kConsumerWarps + 2);
    mbarrier_init(smem_addr(&shared.ds_full[i]), kConsumerWarps);
    mbarrier_init(smem_addr(&shared.ds_empty[i]), kConsumerWarps);
    for (int j = 0; j < Shape::kDqStages; ++j) {
      mbarrier_init(smem_addr(&shared.dq_full[i][j]), kConsumerWarps / 2);
      mbarrier_init(smem_addr(&shared.dq_empty[i][j]), 1);
      mbarrier_init(smem_addr(&shared.sums_full[i][j]), 1);
    }
  }
  fence_mbarrier_init();
}

template <class Shape>
__global__ void __launch_bounds__(kSm90Threads, 1)
    fused_kernel(const __grid_constant__ BwdMaps maps, FusedOutputs out, RowSums sums, FusedSlice f, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(raw);
  if (threadIdx.x == 0) init_barriers<Shape>(shared);
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0)
      load_tiles<Shape>(shared, maps, sums, f, z);
    else if (warp < 3 && threadIdx.x % 32 == 0)
      add_dq<Shape>(shared, f, z, warp - 1);
  } else {
    more_registers<kConsumerRegisters>();
    if constexpr (Shape::kPieces == 1)
      multiply_narrow<Shape>(shared, out, f, z);
    else
      multiply_wide<Shape>(shared, out, f, z);
  }
}

// dq = 0 of the tiles of queries that see no key of a part. blockIdx: tile, head, sequence.
template <class Shape>
__global__ void __launch_bounds__(256) clear_unseen_kernel(T* dq, AttentionSizes z) {
  constexpr int kChunks = Shape::kWidth / 8;
  const int h = blockIdx.y, b = blockIdx.z;
  const int64_t row = int64_t{blockIdx.x} * Shape::kRows, last_row = z.shift + row + Shape::kRows - 1,
                last_block = last_row < 0 ? -1 : (last_row < z.kv_rows ? last_row : z.kv_rows - 1) / Shape::kKeys;
  const int64_t first = first_key(z, b, row);
  if (first < z.kv_rows && first / Shape::kKeys <= last_block) return;
  for (int i = threadIdx.x; i < Shape::kRows * kChunks; i += blockDim.x) {
    const int64_t r = row + i / kChunks;
    if (r < z.rows)
      *reinterpret_cast<uint4*>(dq + ((b * z.rows + r) * z.heads + h) * Shape::kWidth + i % kChunks * 8) = {};
  }
}

template <class Shape>
void launch(Stream& s, const AttentionBwd& a, const RowSums& sums, const FusedPlan& plan, void* scratch) {
  const AttentionSizes z = attention_sizes(a);
  constexpr int kBytes = sizeof(typename Shape::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(fused_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const cudaStream_t stream = cuda_stream(s);
  const BwdMaps maps = bwd_maps(a, Shape::kRows, Shape::kKeys);
  const FusedOutputs out{
      .dq = static_cast<T*>(a.dq_THd.data), .dk = static_cast<T*>(a.dk_TGd.data), .dv = static_cast<T*>(a.dv_TGd.data)};
  const int groups = narrow<int>(a.batch * z.kv_heads);
  FusedSlice f{.dq = static_cast<float*>(scratch),
               .key_blocks = narrow<int>(div_ceil(z.kv_rows, Shape::kKeys)),
               .tiles = narrow<int>(div_ceil(z.rows, Shape::kRows)),
               .heads = z.heads / z.kv_heads,
               .heads_outer = z.window > 0};
  // Not the blocks of this launch: dk and dv are summed in the order of the walk.
  const int multiprocessors = gpu_limits(s).num_multiprocessors;
  f.set = narrow<int>(alternating_set(ds_sizes(a), multiprocessors));
  f.tickets = reinterpret_cast<int*>(static_cast<unsigned char*>(scratch) + plan.dq_bytes);
  f.added = f.tickets + 1;
  for (f.first = 0; f.first < groups; f.first += f.groups) {
    f.groups = std::min(narrow<int>(plan.groups_of_slice), groups - f.first);
    f.wave = std::min(narrow<int>(plan.wave), f.groups);
    const int blocks = limited_blocks(s, std::min(f.groups * f.key_blocks, multiprocessors));
    MOEBIUS_CUDA(cudaMemsetAsync(f.tickets, 0, plan.counter_bytes, stream));
    fused_kernel<Shape><<<blocks, kSm90Threads, kBytes, stream>>>(maps, out, sums, f, z);
    check_launch("attention_bwd");
  }
  if (z.shift >= 0 && z.shift + z.rows <= z.kv_rows) return;  // each query attends to a key
  clear_unseen_kernel<Shape><<<dim3(f.tiles, z.heads, static_cast<unsigned>(a.batch)), 256, 0, stream>>>(out.dq, z);
  check_launch("attention_bwd");
}

}  // namespace

void sm90_fused_bwd(Stream& s, const AttentionBwd& a, const RowSums& sums, const FusedPlan& plan, void* scratch) {
  const int64_t width = a.q_THd.dim(2);
  if (width == 64)
    launch<FusedShape<64>>(s, a, sums, plan, scratch);
  else if (width == 96)
    launch<FusedShape<96>>(s, a, sums, plan, scratch);
  else if (width == 128)
    launch<FusedShape<128>>(s, a, sums, plan, scratch);
  else
    launch<FusedShape<192>>(s, a, sums, plan, scratch);
}

}  // namespace moebius::cuda
