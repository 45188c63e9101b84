#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/sm90/copy.h"
#include "ops/vocab/cuda/loss_rows.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kVectors = 10;  // of four logits, in the registers of a thread
constexpr int kMaxPart = kThreads * kVectors * 4;
constexpr int kMaxBlocksOfRow = 8;  // that a cluster may have everywhere
constexpr int kStages = 2;

// Writes a part to the same address in another block of the cluster, and counts the 8 bytes at that block's barrier.
__device__ __forceinline__ void send(LossPart part, uint32_t to, uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n .reg .b32 there, its_barrier;\n .reg .b64 value;\n"
      " mapa.shared::cluster.u32 there, %0, %2;\n"
      " mapa.shared::cluster.u32 its_barrier, %1, %2;\n"
      " mov.b64 value, {%3, %4};\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], value, [its_barrier];\n}\n" ::"r"(to),
      "r"(barrier), "r"(block), "f"(part.max), "f"(part.sum)
      : "memory");
}

// The same as mbarrier_wait, for data that other blocks of the cluster sent.
__device__ __forceinline__ void wait_for_parts(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

struct Shared {
  uint64_t loaded[kStages];  // a stage has its part of a row
  uint64_t received[2];      // every block's part has come, for even and odd rows
  LossPart parts[2][kMaxBlocksOfRow];
  float sums[2][32];
};

// Sends a block's part of the turn-th row to the others, and returns the parts of all, one per lane. A block sends its
// part of row r + 2 only after it has all parts of row r + 1, and those are sent only after the parts of row r were
// read. So two sets of buffers are enough. A cluster of one block sends nothing.
__device__ LossPart exchange(Shared& shared, LossPart mine, int block, int num_blocks, int turn) {
  const int lane = threadIdx.x % 32;
  if (num_blocks == 1) return lane == 0 ? mine : LossPart{0, 0};
  const uint32_t received = smem_addr(&shared.received[turn % 2]);
  if (threadIdx.x == 0) mbarrier_arrive_expect(received, static_cast<uint32_t>(num_blocks) * sizeof(LossPart));
  if (static_cast<int>(threadIdx.x) < num_blocks)
    send(mine, smem_addr(&shared.parts[turn % 2][block]), received, threadIdx.x);
  wait_for_parts(received, turn / 2 % 2);
  return lane < num_blocks ? shared.parts[turn % 2][lane] : LossPart{0, 0};
}

// A cluster processes rows in turn; each of its blocks has the same columns of all of them. While a block processes one
// row in registers, its parts of the next two are copied to shared memory.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    prefetched_loss_rows_kernel(LossRows<T> a, int rows, int num_blocks, int columns) {
  extern __shared__ __align__(16) float stages[];
  __shared__ Shared shared;
  const int block = static_cast<int>(cluster_block_rank());
  const int num_clusters = gridDim.x / num_blocks;
  const int begin = block * columns, count = min(columns, a.vocab - begin);
  const auto load_row = [&](int row, int stage) {
    const uint32_t barrier = smem_addr(&shared.loaded[stage]), bytes = static_cast<uint32_t>(count) * 4;
    mbarrier_arrive_expect(barrier, bytes);
    bulk_load(smem_addr(stages + stage * columns), a.logits + static_cast<int64_t>(row) * a.vocab + begin, bytes,
              barrier);
  };
  const int first_row = blockIdx.x / num_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(smem_addr(&shared.loaded[i]), 1);
    for (int i = 0; i < 2; ++i) mbarrier_init(smem_addr(&shared.received[i]), 1);
    fence_mbarrier_init();
    for (int i = 0; i < kStages; ++i) {
      if (first_row + i * num_clusters < rows) load_row(first_row + i * num_clusters, i);
    }
  }
  cluster_sync();
  const float scale = a.scale_in_memory ? *a.scale_in_memory : a.scale;
  float weight = a.weight[first_row];
  int target = a.target[first_row];
  for (int row = first_row, turn = 0; row < rows; row += num_clusters, ++turn) {
    const int stage = turn % kStages, next_row = row + num_clusters;
    const uint32_t round = turn / kStages % 2;
    const float next_weight = next_row < rows ? a.weight[next_row] : 0.0f;
    const int next_target = next_row < rows ? a.target[next_row] : 0;
    require(weight == 0 || (0 <= target && target < a.vocab));
    const bool has_target = weight != 0 && begin <= target && target < begin + count;
    const float* part = stages + stage * columns;
    mbarrier_wait(smem_addr(&shared.loaded[stage]), round);
    float x[kVectors][4], max = -INFINITY;
    const auto column = [](int v) { return (v * kThreads + static_cast<int>(threadIdx.x)) * 4; };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) >= count) continue;
      const float4 word = *reinterpret_cast<const float4*>(part + column(v));
      x[v][0] = word.x, x[v][1] = word.y, x[v][2] = word.z, x[v][3] = word.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) max = fmaxf(max, x[v][i]);
    }
    const float target_logit = has_target && threadIdx.x == 0 ? part[target - begin] : 0.0f;
    max = block_max(max, shared.sums[0]);
    // The barrier in block_max: all have read the stage.
    if (threadIdx.x == 0 && row + kStages * num_clusters < rows) load_row(row + kStages * num_clusters, stage);
    // If no logit of the block is above -inf, any finite number will do.
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) >= count) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += x[v][i] = __expf(x[v][i] - base);
    }
    sum = block_sum(sum, shared.sums[1]);

    const LossPart other = exchange(shared, {base, sum}, block, num_blocks, turn);
    const float row_max = warp_max(other.sum == 0 ? -INFINITY : other.max);
    const float row_sum = warp_sum(other.sum == 0 ? 0.0f : other.sum * expf(other.max - row_max));
    if (threadIdx.x == 0 && has_target) a.loss[row] = weight * (logf(row_sum) + (row_max - target_logit));
    if (threadIdx.x == 0 && block == 0 && weight == 0) a.loss[row] = 0;
    if (a.dlogits) {
      const float factor = scale * weight / row_sum * expf(base - row_max);
      const int target_column = has_target ? target - begin : -4;
      T* to = a.dlogits + static_cast<int64_t>(row) * a.vocab + begin;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column(v) >= count) continue;
        float d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = weight == 0 ? 0.0f : x[v][i] * factor;
        if (target_column - target_column % 4 == column(v)) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (column(v) + i == target_column) d[i] -= scale * weight;
          }
        }
        store(to + column(v), d);
      }
    }
    weight = next_weight;
    target = next_target;
  }
  // Memory of a block stays while others may still send to it.
  cluster_sync();
}

}  // namespace

template <class T>
bool prefetched_loss_rows(Stream& s, const LossRows<T>& a, int64_t rows) {
  const int64_t blocks = div_ceil(a.vocab, kMaxPart);
  if (blocks > kMaxBlocksOfRow) return false;
  const int columns = static_cast<int>(div_ceil(a.vocab / 4, blocks) * 4);
  void (*const kernel)(LossRows<T>, int, int, int) = prefetched_loss_rows_kernel<T>;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(kStages) * columns * sizeof(float);
  config.stream = cuda_stream(s);
  config.attrs = &cluster;
  config.numAttrs = 1;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.dynamicSmemBytes)));
  // All clusters run at the same time; otherwise the last ones would run alone.
  config.gridDim = dim3(narrow<int>(blocks));
  int clusters = 0;
  MOEBIUS_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  clusters = static_cast<int>(std::clamp<int64_t>(clusters, 1, rows));
  config.gridDim = dim3(narrow<int>(clusters * blocks));
  MOEBIUS_CUDA(cudaLaunchKernelEx(&config, kernel, a, narrow<int>(rows), static_cast<int>(blocks), columns));
  return true;
}

template bool prefetched_loss_rows(Stream&, const LossRows<float>&, int64_t);
template bool prefetched_loss_rows(Stream&, const LossRows<bf16>&, int64_t);

}  // namespace moebius::cuda
