// The iteration of the sm_90 kernels of experts over tiles: persistent clusters of two blocks, and numbers of tiles
// that follow from offsets in memory.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <initializer_list>

#include "core/tensor.h"
#include "device/block_limit.h"
#include "device/cuda/cuda.h"

namespace moebius::cuda::sm90 {

inline bool aligned_16(std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  }
  return true;
}

// Returns whether every row of each bf16 matrix begins at a multiple of 16 bytes.
inline bool rows_are_aligned(std::initializer_list<Tensor> matrices) {
  for (const Tensor& m : matrices) {
    if (m.dim(1) % 8 != 0) return false;
  }
  return aligned_16(matrices);
}

// Returns the number of blocks: one per multiprocessor, in whole clusters of two. Allows the kernel
// shared_bytes of shared memory.
inline int persistent_blocks(const void* kernel, int shared_bytes) {
  int device = 0, num = 0;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  MOEBIUS_CUDA(cudaGetDevice(&device));
  MOEBIUS_CUDA(cudaDeviceGetAttribute(&num, cudaDevAttrMultiProcessorCount, device));
  return num / 2 * 2;
}

// Returns the blocks of a launch: whole clusters of two, within the limit on blocks if that allows one.
inline int blocks_in_clusters(const Stream& s, int blocks) { return std::max(2, limited_blocks(s, blocks) / 2 * 2); }

struct GridStep {
  int row, col;
};
// Returns step i of an iteration over rows x cols in groups of rows: down the rows of a group, then the next column. So
// at any moment the blocks read a few rows and a few columns, which stay in L2.
__device__ inline GridStep grouped_step(int i, int rows, int cols, int group) {
  const int first = i / (group * cols) * group, within = i % (group * cols), height = min(group, rows - first);
  return {first + within % height, within / height};
}

}  // namespace moebius::cuda::sm90
