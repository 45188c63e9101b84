// How the sm_90 kernels of experts walk over tiles: persistent clusters of two blocks, tile counts of each expert from
// offsets in memory.
#pragma once

#include <cuda_bf16.h>

#include <initializer_list>

#include "core/cuda.h"
#include "core/tensor.h"

namespace moebius::cuda::sm90 {

inline bool aligned_16(std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  }
  return true;
}

// Every row of each bf16 matrix begins at a multiple of 16 bytes.
inline bool rows_are_aligned(std::initializer_list<Tensor> matrices) {
  for (const Tensor& m : matrices) {
    if (m.dim(1) % 8 != 0) return false;
  }
  return aligned_16(matrices);
}

// One block a multiprocessor, in whole clusters of two; lets the kernel have that much shared memory.
inline int persistent_blocks(const void* kernel, int shared_bytes) {
  int device = 0, num = 0;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  MOEBIUS_CUDA(cudaGetDevice(&device));
  MOEBIUS_CUDA(cudaDeviceGetAttribute(&num, cudaDevAttrMultiProcessorCount, device));
  return num / 2 * 2;
}

struct GridStep {
  int row, col;
};
// Step i of a walk over rows x cols that stays in groups of rows: down the rows of a group, then the next column. What
// the blocks of a moment read is then a few rows and a few columns, and stays in L2.
__device__ inline GridStep grouped_step(int i, int rows, int cols, int group) {
  const int first = i / (group * cols) * group, within = i % (group * cols), height = min(group, rows - first);
  return {first + within % height, within / height};
}

// first[e] = sum over the experts before e of num(expert); by one warp.
template <class Num>
__device__ void scan_experts(int32_t* first, int num_experts, Num&& num) {
  const int lane = threadIdx.x % 32;
  int32_t before = 0;
  if (lane == 0) first[0] = 0;
  for (int e0 = 0; e0 < num_experts; e0 += 32) {
    int32_t sum = e0 + lane < num_experts ? num(e0 + lane) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (e0 + lane < num_experts) first[e0 + lane + 1] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
}

}  // namespace moebius::cuda::sm90
