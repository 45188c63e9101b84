#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kColumns = 32, kRowsAtOnce = 8;

template <class T>
struct BiasGrad {
  float* db;
  const T* x;
  const float* weight;
  const int32_t *offsets, *token;
  int64_t M, N, first;
};

// A block owns 32 columns of one expert: each warp every eighth row, then the eight sums are
// added in order.
template <class T>
__global__ void __launch_bounds__(kColumns* kRowsAtOnce) bias_grad_kernel(BiasGrad<T> a) {
  __shared__ float sums[kRowsAtOnce][kColumns];
  const int64_t e = blockIdx.y, n = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  float sum = 0;
  for (int64_t r = a.offsets[e] + threadIdx.y; n < a.N && r < a.offsets[e + 1]; r += kRowsAtOnce) {
    const float weight = a.weight ? a.weight[r] : 1.0f;
    sum += weight * element(a.x[(a.token ? a.token[r] : r) * a.M + a.first + n]);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || n >= a.N) return;
  for (int i = 1; i < kRowsAtOnce; ++i) sum += sums[i][threadIdx.x];
  a.db[e * a.N + n] += sum;
}

}  // namespace

void expert_bias_grad(Stream& s, const ExpertBiasGrad& a) {
  with_float_type(a.x_RM.dtype, [&]<class T>(T) {
    const BiasGrad<T> grad{.db = a.db_eN.ptr<float>(),
                           .x = a.x_RM.ptr<T>(),
                           .weight = a.weight_R.empty() ? nullptr : a.weight_R.ptr<float>(),
                           .offsets = a.rows.offsets_e1.ptr<int32_t>(),
                           .token = a.gather ? index_of(a.rows) : nullptr,
                           .M = a.x_RM.dim(1),
                           .N = a.db_eN.dim(1),
                           .first = a.x_first};
    const dim3 grid(num_blocks(grad.N, kColumns), static_cast<unsigned>(a.db_eN.dim(0)));
    bias_grad_kernel<T><<<grid, dim3(kColumns, kRowsAtOnce), 0, cuda_stream(s)>>>(grad);
  });
  check_launch("expert_bias_grad");
}

}  // namespace moebius::cuda
