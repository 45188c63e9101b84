#include "device/cuda/cuda.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {
namespace {

constexpr int kColumns = 32, kStrips = 16;

// A block owns 32 columns; strip i of it adds partials i, i + 16, ..., and the strips are
// added in order.
__global__ void add_rows_kernel(AddRows a) {
  __shared__ float sums[kStrips][kColumns];
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  float sum = 0;
  if (column < a.width) {
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < a.num_partials; p += kStrips) sum += a.partial[p * a.ld + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= a.width) return;
  for (int i = 1; i < kStrips; ++i) sum += sums[i][threadIdx.x];
  a.sum[column] += sum;
}

}  // namespace

void add_rows(cudaStream_t stream, const AddRows& a) {
  add_rows_kernel<<<num_blocks(a.width, kColumns), dim3(kColumns, kStrips), 0, stream>>>(a);
  check_launch("add_rows");
}

}  // namespace moebius::cuda
