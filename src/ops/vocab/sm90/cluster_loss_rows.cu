// The loss of rows of logits on Hopper. Rows that fit twice into shared memory are prefetched (loss_rows.cu). Each of
// the others is read by a cluster of blocks: once, or more often if the registers cannot hold the row.
#include <cooperative_groups.h>

#include "device/cuda/cuda.h"
#include "ops/sm90/sync.h"
#include "ops/vocab/cuda/loss_row.h"

namespace moebius::cuda {
namespace {

constexpr int kMaxBlocksOfRow = 8;  // that a cluster may have everywhere

// Adds up the parts of the blocks of a cluster. It arrives at the cluster's barrier, at which a block
// waits before it ends.
__device__ __forceinline__ LossPart part_of_cluster(const LossPart& mine) {
  __shared__ LossPart part;
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) part = mine;
  cluster.sync();
  // Each warp adds the parts up, one lane a block.
  const int lane = threadIdx.x % 32;
  const LossPart other =
      lane < static_cast<int>(cluster.num_blocks()) ? *cluster.map_shared_rank(&part, lane) : LossPart{0, 0};
  const float row_max = warp_max(other.sum == 0 ? -INFINITY : other.max);
  const float row_sum = warp_sum(other.sum == 0 ? 0.0f : other.sum * expf(other.max - row_max));
  // No block may end while another still reads its part. The sum, which needs the part, is computed before the arrival.
  // Nothing was written that others wait for, so the arrival is relaxed.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::"f"(row_sum) : "memory");
  return {row_max, row_sum};
}

// A cluster owns a row of logits; its blocks exchange their parts.
template <int kNum, int kVectors, class T>
__global__ void __launch_bounds__(kLossThreads, 1) cluster_loss_rows_kernel(LossRows<T> a) {
  const auto cluster = cooperative_groups::this_cluster();
  const Team team{static_cast<int>(cluster.block_rank()), static_cast<int>(cluster.num_blocks())};
  const int64_t row = blockIdx.x / team.num_blocks;
  if (a.weight[row] == 0) return skip_row<kNum>(a, row, team);
  loss_of_row<kNum, kVectors>(a, row, team, [](const LossPart& mine) { return part_of_cluster(mine); });
  cluster_wait();
}

template <int kNum, int kVectors, class T>
void launch(Stream& s, const LossRows<T>& a, int64_t rows, int64_t blocks_of_row) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks_of_row), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(narrow<int>(rows * blocks_of_row));
  config.blockDim = dim3(kLossThreads);
  config.stream = cuda_stream(s);
  config.attrs = &cluster;
  config.numAttrs = 1;
  MOEBIUS_CUDA(cudaLaunchKernelEx(&config, cluster_loss_rows_kernel<kNum, kVectors, T>, a));
}

}  // namespace

// Chooses the fewest blocks, and the fewest registers, that hold a row.
template <class T>
void hopper_loss_rows(Stream& s, const LossRows<T>& a, int64_t rows, bool aligned) {
  if (aligned && prefetched_loss_rows(s, a, rows)) return;
  const auto blocks = [&](int per_thread) { return div_ceil(a.vocab, kLossThreads * per_thread); };
  if (!aligned) {
    if (blocks(16) <= kMaxBlocksOfRow) return launch<1, 16>(s, a, rows, blocks(16));
    return launch<1, 0>(s, a, rows, kMaxBlocksOfRow);
  }
  if (blocks(64) <= kMaxBlocksOfRow) return launch<4, 16>(s, a, rows, blocks(64));
  launch<4, 0>(s, a, rows, kMaxBlocksOfRow);
}

template void hopper_loss_rows(Stream&, const LossRows<float>&, int64_t, bool);
template void hopper_loss_rows(Stream&, const LossRows<bf16>&, int64_t, bool);

}  // namespace moebius::cuda
