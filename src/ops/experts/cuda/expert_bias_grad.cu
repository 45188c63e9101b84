#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_backends.h"

namespace moebius::cuda {
namespace {

// A block has few columns and many rows, so that even an expert with most of the rows keeps many blocks busy.
constexpr int kLanes = 8, kRowsAtOnce = 64;

template <class T>
struct BiasGrad {
  float* db;
  const T* x;
  const float* weight;
  const int32_t *offsets, *token;
  int64_t M, N, first;
};

// A block owns kLanes * kNum columns of one expert: kLanes threads take every 64th row, then the 64 sums
// are added in order.
template <int kNum, class T>
__global__ void __launch_bounds__(kLanes* kRowsAtOnce) bias_grad_kernel(BiasGrad<T> a) {
  __shared__ float sums[kRowsAtOnce][kLanes * kNum];
  const int64_t e = blockIdx.y, first = int64_t{blockIdx.x} * kLanes * kNum, n = first + threadIdx.x * kNum;
  float sum[kNum] = {};
#pragma unroll 4
  for (int64_t r = a.offsets[e] + threadIdx.y; n < a.N && r < a.offsets[e + 1]; r += kRowsAtOnce) {
    const float weight = a.weight ? a.weight[r] : 1.0f;
    float x[kNum];
    load<kNum>(x, a.x + (a.token ? a.token[r] : r) * a.M + a.first + n);
#pragma unroll
    for (int i = 0; i < kNum; ++i) sum[i] += weight * x[i];
  }
#pragma unroll
  for (int i = 0; i < kNum; ++i) sums[threadIdx.y][threadIdx.x * kNum + i] = sum[i];
  __syncthreads();
  for (int column = threadIdx.y * kLanes + threadIdx.x; column < kLanes * kNum && first + column < a.N;
       column += kLanes * kRowsAtOnce) {
    float total = 0;
    for (int i = 0; i < kRowsAtOnce; ++i) total += sums[i][column];
    a.db[e * a.N + first + column] += total;
  }
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
    const auto launch = [&]<int kNum>(std::integral_constant<int, kNum>) {
      const dim3 grid(num_blocks(grad.N, kLanes * kNum), static_cast<unsigned>(a.db_eN.dim(0)));
      bias_grad_kernel<kNum, T><<<grid, dim3(kLanes, kRowsAtOnce), 0, cuda_stream(s)>>>(grad);
    };
    const bool aligned = grad.N % kPerVector<T> == 0 && rows_are_aligned(grad.M, sizeof(T), grad.x + grad.first);
    if (aligned)
      launch(std::integral_constant<int, kPerVector<T>>{});
    else
      launch(std::integral_constant<int, 1>{});
  });
  check_launch("expert_bias_grad");
}

}  // namespace moebius::cuda
