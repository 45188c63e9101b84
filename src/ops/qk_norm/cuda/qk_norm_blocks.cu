#include "ops/qk_norm/qk_norm_blocks.h"

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/vector.h"
#include "ops/qk_norm/qk_norm_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

// Rows [A columns of q | B of k | B of v]; all ranks together normalise part 0, q, and part 1, k.
template <class T>
struct Rows {
  T* out;  // y or dx
  const T *x, *dy, *q_norm, *k_norm;
  float* sums;  // [rows, num_sums]
  int num_sums;
  int64_t rows;
  int A, B, num_ranks;
  float eps;

  __host__ __device__ int64_t width() const { return A + int64_t{2} * B; }
  __device__ __forceinline__ int part_width(int part) const { return part == 0 ? A : B; }
  __device__ __forceinline__ int64_t begin(int64_t row, int part) const { return row * width() + (part == 0 ? 0 : A); }
  __device__ __forceinline__ const T* weight(int part) const { return part == 0 ? q_norm : k_norm; }
  __device__ __forceinline__ float all(int part) const {
    return static_cast<float>(int64_t{part_width(part)} * num_ranks);
  }
  __device__ __forceinline__ float rstd(int64_t row, int part) const {
    return 1.0f / sqrtf(sums[row * num_sums + part] / all(part) + eps);
  }
};

template <class T, class Op>
Rows<T> rows_of(const Op& a) {
  return {.x = a.x_TC.template ptr<T>(),
          .q_norm = a.q_norm_A.template ptr<T>(),
          .k_norm = a.k_norm_B.template ptr<T>(),
          .rows = a.x_TC.dim(0),
          .A = narrow<int>(a.q_norm_A.numel()),
          .B = narrow<int>(a.k_norm_B.numel())};
}

// The threads of a block call fn(column) for the columns of a part; each call is for kNum columns.
template <int kNum, class F>
__device__ __forceinline__ void each_vector(int width, F&& fn) {
  for (int j = threadIdx.x * kNum; j < width; j += kThreads * kNum) fn(j);
}

// The grid is [row, part].
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) sums_kernel(Rows<T> a) {
  __shared__ float shared[2][32];
  const int part = blockIdx.y;
  const int64_t row = blockIdx.x, begin = a.begin(row, part);
  float squares = 0, products = 0;
  each_vector<kNum>(a.part_width(part), [&](int j) {
    float x[kNum], dy[kNum], w[kNum];
    load(x, a.x + begin + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) squares += x[i] * x[i];
    if (!a.dy) return;
    load(dy, a.dy + begin + j);
    load(w, a.weight(part) + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) products += dy[i] * x[i] * w[i];
  });
  squares = block_sum(squares, shared[0]);
  if (a.dy) products = block_sum(products, shared[1]);
  if (threadIdx.x != 0) return;
  a.sums[row * a.num_sums + part] = squares;
  if (a.dy) a.sums[row * a.num_sums + 2 + part] = products;
}

// Copies the columns of v unchanged.
template <int kNum, class T>
__device__ __forceinline__ void copy_v(const Rows<T>& a, int64_t row) {
  const int64_t begin = (row + 1) * a.width() - a.B;
  each_vector<kNum>(a.B, [&](int j) {
    float v[kNum];
    load(v, a.x + begin + j);
    store(a.out + begin + j, v);
  });
}

// The grid is [row, part]; the third part is v.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) fwd_kernel(Rows<T> a) {
  const int part = blockIdx.y;
  const int64_t row = blockIdx.x, begin = a.begin(row, part);
  if (part == 2) return copy_v<kNum>(a, row);
  const float rstd = a.rstd(row, part);
  each_vector<kNum>(a.part_width(part), [&](int j) {
    float x[kNum], w[kNum];
    load(x, a.x + begin + j);
    load(w, a.weight(part) + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) w[i] *= rounded<T>(x[i] * rstd);
    store(a.out + begin + j, w);
  });
}

// The grid is [row, part]. out is dy.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) bwd_kernel(Rows<T> a) {
  const int part = blockIdx.y;
  const int64_t row = blockIdx.x, begin = a.begin(row, part);
  const float rstd = a.rstd(row, part), mean = rstd * a.sums[row * a.num_sums + 2 + part] / a.all(part);
  each_vector<kNum>(a.part_width(part), [&](int j) {
    float x[kNum], dy[kNum], w[kNum];
    load(x, a.x + begin + j);
    load(dy, a.dy + begin + j);
    load(w, a.weight(part) + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) x[i] = rstd * (dy[i] * w[i] - x[i] * rstd * mean);
    store(a.out + begin + j, x);
  });
}

constexpr int kColumns = 32, kStrips = 16;

// A block owns 32 columns of a part; strip i of it adds rows i, i + 16, ..., and the strips are
// added in order.
template <class T>
__global__ void __launch_bounds__(kColumns* kStrips) weight_kernel(Rows<T> a, float* dw, int part) {
  __shared__ float strips[kStrips][kColumns];
  const int column = blockIdx.x * kColumns + threadIdx.x;
  float sum = 0;
  if (column < a.part_width(part)) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < a.rows; row += kStrips) {
      const int64_t at = a.begin(row, part) + column;
      sum += element(a.dy[at]) * (element(a.x[at]) * a.rstd(row, part));
    }
  }
  strips[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= a.part_width(part)) return;
  for (int i = 1; i < kStrips; ++i) sum += strips[i][threadIdx.x];
  dw[column] += sum;
}

// Calls launch with the widest vectors that all parts of all rows allow.
template <class T, class F>
void with_vectors(const Stream& s, const char* op, const Rows<T>& a, F&& launch) {
  const bool whole = a.A % kPerVector<T> == 0 && rows_are_aligned(a.B, sizeof(T), a.out, a.x, a.dy, a.q_norm, a.k_norm);
  if (whole) return launch(std::integral_constant<int, kPerVector<T>>{});
  note_odd_rows(s, op, dtype_of<T>, a.A % kPerVector<T> != 0 ? a.A : a.B);
  launch(std::integral_constant<int, 1>{});
}

}  // namespace

void qk_norm_sums(Stream& s, const QkNormSums& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(a);
    rows.dy = a.dy_TC.empty() ? nullptr : a.dy_TC.ptr<T>();
    rows.sums = a.sums_TS.ptr<float>();
    rows.num_sums = narrow<int>(a.sums_TS.dim(1));
    with_vectors(s, "qk_norm_sums", rows, [&](auto num) {
      sums_kernel<num.value><<<dim3(narrow<int>(rows.rows), 2), kThreads, 0, cuda_stream(s)>>>(rows);
    });
  });
  check_launch("qk_norm_sums");
}

void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(a);
    rows.out = a.y_TC.ptr<T>(), rows.sums = a.sums_T2.ptr<float>(), rows.num_sums = 2;
    rows.num_ranks = narrow<int>(a.num_ranks), rows.eps = a.eps;
    with_vectors(s, "qk_norm_block_fwd", rows, [&](auto num) {
      fwd_kernel<num.value><<<dim3(narrow<int>(rows.rows), 3), kThreads, 0, cuda_stream(s)>>>(rows);
    });
  });
  check_launch("qk_norm_block_fwd");
}

void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto rows = rows_of<T>(a);
    rows.out = a.dx_TC.ptr<T>(), rows.dy = rows.out, rows.sums = a.sums_T4.ptr<float>(), rows.num_sums = 4;
    rows.num_ranks = narrow<int>(a.num_ranks), rows.eps = a.eps;
    const dim3 threads(kColumns, kStrips);
    weight_kernel<<<num_blocks(rows.A, kColumns), threads, 0, cuda_stream(s)>>>(rows, a.dq_norm_A.ptr<float>(), 0);
    weight_kernel<<<num_blocks(rows.B, kColumns), threads, 0, cuda_stream(s)>>>(rows, a.dk_norm_B.ptr<float>(), 1);
    // This kernel is last, since it overwrites dy.
    with_vectors(s, "qk_norm_block_bwd", rows, [&](auto num) {
      bwd_kernel<num.value><<<dim3(narrow<int>(rows.rows), 2), kThreads, 0, cuda_stream(s)>>>(rows);
    });
  });
  check_launch("qk_norm_block_bwd");
}

}  // namespace moebius::cuda
