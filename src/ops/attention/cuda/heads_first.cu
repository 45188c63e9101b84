#include "device/cuda/cuda.h"
#include "ops/attention/cuda/attention.h"

namespace moebius::cuda {
namespace {

constexpr int kTile = 32;

// A block transposes a tile of rows x heads of one sequence through shared memory, so that both its reads and its
// writes are contiguous.
__global__ void __launch_bounds__(kTile* kTile) heads_first_kernel(HeadsFirst a) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t b = blockIdx.z, row = int64_t{blockIdx.x} * kTile, head = int64_t{blockIdx.y} * kTile;
  const int tx = threadIdx.x, ty = threadIdx.y;
  if (row + ty < a.rows && head + tx < a.heads) tile[ty][tx] = a.from[(b * a.rows + row + ty) * a.heads + head + tx];
  __syncthreads();
  if (row + tx < a.rows && head + ty < a.heads) a.to[(b * a.heads + head + ty) * a.rows + row + tx] = tile[tx][ty];
}

}  // namespace

void heads_first(Stream& s, const HeadsFirst& a) {
  const dim3 grid(static_cast<unsigned>(div_ceil(a.rows, kTile)), static_cast<unsigned>(div_ceil(a.heads, kTile)),
                  static_cast<unsigned>(a.batch));
  heads_first_kernel<<<grid, dim3(kTile, kTile), 0, cuda_stream(s)>>>(a);
  check_launch("heads_first");
}

}  // namespace moebius::cuda
