#include <cuda_bf16.h>

#include "device/cuda/cuda.h"
#include "ops/cuda/grid.h"
#include "ops/gemm/cuda/gemm_trial.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kBlocks = 1024, kTile = 32;

__device__ float load(const float* p) { return *p; }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float x) { *p = x; }
__device__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }

__device__ float uniform(uint32_t i, uint32_t seed) {
  uint32_t x = i * 0x9E3779B9u + seed * 0x85EBCA6Bu;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return static_cast<float>(static_cast<int32_t>(x ^ (x >> 16))) * 0x1p-31f;
}

template <class T>
__global__ void fill_kernel(T* to, FillTrial a) {
  const int64_t n = a.outer * a.k, half = a.k / 2;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += int64_t{kThreads} * gridDim.x) {
    const int64_t k = a.k_is_row ? i / a.outer : i % a.k, outer = a.k_is_row ? i % a.outer : i / a.k;
    const bool second = half > 0 && k >= half;
    const float x = a.scale * uniform(static_cast<uint32_t>(half > 0 ? outer * half + k % half : i), a.seed);
    store(to + i, half > 0 && k >= 2 * half ? 0.0f : (second && a.turn_sign ? -x : x));
  }
}

__global__ void compare_kernel(int* differs, const uint32_t* x, const uint32_t* y, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += int64_t{kThreads} * gridDim.x) {
    if (x[i] != y[i]) *differs = 1;
  }
}

struct Strides {
  int64_t row, col;
};

// A block computes a tile of c, a thread one element of it.
template <class T, class C>
__global__ void __launch_bounds__(kTile* kTile) tiled_kernel(C* c, const T* a, const T* b, int64_t m, int64_t n,
                                                             int64_t k, Strides sa, Strides sb, bool accumulate) {
  __shared__ float a_tile[kTile][kTile + 1], b_tile[kTile][kTile + 1];
  const int64_t row = blockIdx.y * int64_t{kTile} + threadIdx.y, col = blockIdx.x * int64_t{kTile} + threadIdx.x;
  float sum = 0;
  for (int64_t first = 0; first < k; first += kTile) {
    const int64_t ka = first + threadIdx.x, kb = first + threadIdx.y;
    a_tile[threadIdx.y][threadIdx.x] = row < m && ka < k ? load(a + row * sa.row + ka * sa.col) : 0.0f;
    b_tile[threadIdx.y][threadIdx.x] = col < n && kb < k ? load(b + kb * sb.row + col * sb.col) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
    __syncthreads();
  }
  if (row >= m || col >= n) return;
  C* to = c + row * n + col;
  store(to, accumulate ? load(to) + sum : sum);
}

template <class T, class C>
void launch(cudaStream_t stream, const Gemm& a) {
  const int64_t m = a.c_MN.dim(0), n = a.c_MN.dim(1), k = a.a.data.dim(a.trans_a ? 0 : 1);
  const Strides sa = a.trans_a ? Strides{1, m} : Strides{k, 1}, sb = a.trans_b ? Strides{1, k} : Strides{n, 1};
  constexpr int64_t kMaxRows = kMaxGridY * kTile;
  for (int64_t row = 0; row < m; row += kMaxRows) {
    const int64_t rows = m - row < kMaxRows ? m - row : kMaxRows;
    const dim3 grid(static_cast<unsigned>(div_ceil(n, kTile)), static_cast<unsigned>(div_ceil(rows, kTile)));
    tiled_kernel<<<grid, dim3(kTile, kTile), 0, stream>>>(
        static_cast<C*>(a.c_MN.data) + row * n, static_cast<const T*>(a.a.data.data) + row * sa.row,
        static_cast<const T*>(a.b.data.data), rows, n, k, sa, sb, a.accumulate);
    check_launch("gemm");
  }
}

}  // namespace

void fill_trial(Stream& s, const FillTrial& a) {
  const cudaStream_t stream = cuda_stream(s);
  if (a.dtype == DType::bf16)
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(a.to), a);
  else
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<float*>(a.to), a);
  check_launch("gemm");
}

void compare_trial(Stream& s, const CompareTrial& a) {
  const cudaStream_t stream = cuda_stream(s);
  MOEBIUS_CUDA(cudaMemsetAsync(a.differs, 0, sizeof *a.differs, stream));
  compare_kernel<<<kBlocks, kThreads, 0, stream>>>(a.differs, static_cast<const uint32_t*>(a.x),
                                                   static_cast<const uint32_t*>(a.y), a.num_bytes / 4);
  check_launch("gemm");
}

void tiled_gemm(Stream& s, const Gemm& a) {
  const cudaStream_t stream = cuda_stream(s);
  if (a.a.data.dtype == DType::f32)
    launch<float, float>(stream, a);
  else if (a.c_MN.dtype == DType::f32)
    launch<__nv_bfloat16, float>(stream, a);
  else
    launch<__nv_bfloat16, __nv_bfloat16>(stream, a);
}

}  // namespace moebius::cuda
