#include "ops/elementwise/elementwise.h"

#include "device/cuda/cuda.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/tensors.h"
#include "ops/cuda/vector.h"
#include "ops/elementwise/elementwise_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

// A thread owns kNum elements.
template <int kNum, class To, class From>
__global__ void __launch_bounds__(kThreads) convert_kernel(To* to, const From* from, int64_t n) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum;
  if (i >= n) return;
  float x[kNum];
  load(x, from + i);
  store(to + i, x);
}

template <int kNum, class Y, class X>
__global__ void __launch_bounds__(kThreads) add_kernel(Y* y, const X* x, int64_t n) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum;
  if (i >= n) return;
  float sum[kNum], term[kNum];
  load(sum, y + i);
  load(term, x + i);
#pragma unroll
  for (int j = 0; j < kNum; ++j) sum[j] += term[j];
  store(y + i, sum);
}

// A thread owns kNum elements of a row.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) add_row_kernel(T* y, const T* row, int64_t n, int64_t width) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum;
  if (i >= n) return;
  float sum[kNum], term[kNum];
  load(sum, y + i);
  load(term, row + i % width);
#pragma unroll
  for (int j = 0; j < kNum; ++j) sum[j] += term[j];
  store(y + i, sum);
}

// A block owns 32 kNum columns of kRowsOfBlock rows: each warp every eighth row, then the eight sums are added
// in order.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads)
    sum_block_of_rows_kernel(float* partial, const T* x, int64_t rows, int64_t width) {
  constexpr int kWarps = kThreads / 32, kColumns = 32 * kNum;
  __shared__ float sums[kWarps][kColumns];
  const int64_t first_column = int64_t{blockIdx.x} * kColumns, column = first_column + threadIdx.x % 32 * kNum;
  const int64_t first_row = int64_t{blockIdx.y} * SumRows::kRowsOfBlock;
  const int64_t end_row = min(rows, first_row + SumRows::kRowsOfBlock);
  float sum[kNum] = {};
#pragma unroll 4
  for (int64_t t = first_row + threadIdx.x / 32; column < width && t < end_row; t += kWarps) {
    float term[kNum];
    load(term, x + t * width + column);
#pragma unroll
    for (int j = 0; j < kNum; ++j) sum[j] += term[j];
  }
#pragma unroll
  for (int j = 0; j < kNum; ++j) sums[threadIdx.x / 32][threadIdx.x % 32 * kNum + j] = sum[j];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kColumns && first_column + c < width; c += kThreads) {
    float total = 0;
    for (int warp = 0; warp < kWarps; ++warp) total += sums[warp][c];
    partial[blockIdx.y * width + first_column + c] = total;
  }
}

// A thread owns a column.
__global__ void __launch_bounds__(kThreads)
    add_partial_sums_kernel(float* sum, const float* partial, int64_t num_partials, int64_t width) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= width) return;
  float total = sum[column];
#pragma unroll 8
  for (int64_t i = 0; i < num_partials; ++i) total += partial[i * width + column];
  sum[column] = total;
}

// One block computes it: thread i sums the elements i, i + 1024, ...; then the sums of the threads are added in order.
__global__ void __launch_bounds__(1024) sum_into_kernel(double* out, const float* x, int64_t n, double scale) {
  __shared__ double shared[32];
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += 1024) sum += x[i];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *out += scale * sum;
}

template <class T>
struct Gated {
  T* y;   // forward
  T* dx;  // backward
  float* dgate;
  const T *dy, *x;
  const float* gate;
  int64_t width;
};

// A block owns a row.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) gated_add_fwd_kernel(Gated<T> a) {
  const int64_t row = blockIdx.x * a.width;
  const float gate = sigmoid(a.gate[blockIdx.x]);
  for (int64_t j = int64_t{threadIdx.x} * kNum; j < a.width; j += blockDim.x * kNum) {
    float y[kNum], x[kNum];
    load(y, a.y + row + j);
    load(x, a.x + row + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) y[i] += gate * x[i];
    store(a.y + row + j, y);
  }
}

template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) gated_add_bwd_kernel(Gated<T> a) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x * a.width;
  const float gate = sigmoid(a.gate[blockIdx.x]);
  float sum = 0;
  for (int64_t j = int64_t{threadIdx.x} * kNum; j < a.width; j += blockDim.x * kNum) {
    float dy[kNum], x[kNum];
    load(dy, a.dy + row + j);
    load(x, a.x + row + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      sum += dy[i] * x[i];
      dy[i] *= gate;
    }
    store(a.dx + row + j, dy);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) a.dgate[blockIdx.x] = gate * (1.0f - gate) * sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    jitter_kernel(T* y, const T* x, int64_t n, int64_t width, const int64_t* draw, int64_t row, DeviceRng any_step,
                  float eps) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const DeviceRng rng = any_step.at_step(static_cast<uint64_t>(draw[0]));
  const auto first = static_cast<uint64_t>((draw[1] + row) * width);
  if (i < n) set(y[i], element(x[i]) * (1.0f + eps * (2.0f * rng.uniform(first + i) - 1.0f)));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_normal_kernel(T* x, int64_t n, DeviceRng rng, uint64_t first, float mean, float std, bool uniform) {
  constexpr float kSqrt3 = 1.7320508f;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float draw = uniform ? kSqrt3 * (2.0f * rng.uniform(first + i) - 1.0f) : rng.normal(first + i);
  set(x[i], mean + std * draw);
}

template <class T>
__global__ void __launch_bounds__(kThreads) find_nonfinite_kernel(unsigned long long* first, const T* x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n && !isfinite(element(x[i]))) atomicMin(first, static_cast<unsigned long long>(i));
}

// Larger tensors are cleared one by one: they fill the GPU.
constexpr int64_t kSmallBytes = 4 << 20, kBytesOfBlock = 16 << 10;

struct Cleared {
  char* data;
  int64_t num_bytes;
  int first;
  bool whole;  // in vectors of 16 bytes
};

__global__ void __launch_bounds__(kThreads) fill_zeros_kernel(const __grid_constant__ Tensors<Cleared> tensors) {
  const Cleared& t = owner_of(tensors, blockIdx.x);
  const int64_t begin = (static_cast<int>(blockIdx.x) - t.first) * kBytesOfBlock,
                end = min(t.num_bytes, begin + kBytesOfBlock);
  if (t.whole) {
    for (int64_t i = begin + threadIdx.x * 16; i < end; i += kThreads * 16)
      *reinterpret_cast<uint4*>(t.data + i) = make_uint4(0, 0, 0, 0);
  } else {
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) t.data[i] = 0;
  }
}

template <class To, class From>
void convert(Stream& s, To* to, const From* from, int64_t n) {
  if (is_whole(n, 4, to, from))
    convert_kernel<4><<<num_blocks(n / 4, kThreads), kThreads, 0, cuda_stream(s)>>>(to, from, n);
  else
    convert_kernel<1><<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(to, from, n);
  check_launch("copy");
}

template <class Y, class X>
void add_all(Stream& s, Y* sum, const X* term, int64_t n) {
  constexpr int kNum = kPerVector<Y>;
  if (is_whole(n, kNum, sum, term))
    add_kernel<kNum><<<num_blocks(n / kNum, kThreads), kThreads, 0, cuda_stream(s)>>>(sum, term, n);
  else
    add_kernel<1><<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(sum, term, n);
  check_launch("add");
}

int threads_for(int64_t width, int num) { return std::min(kThreads, whole_warps(div_ceil(width, num))); }

}  // namespace

void fill_zero(Stream& s, Tensor x) { MOEBIUS_CUDA(cudaMemsetAsync(x.data, 0, x.num_bytes(), cuda_stream(s))); }

void fill_zeros(Stream& s, std::span<const Tensor> x) {
  for (const Tensor& each : x)
    if (each.num_bytes() > kSmallBytes) cuda::fill_zero(s, each);
  for_each_group<Cleared>(
      x,
      [](const Tensor& each) {
        const bool whole = each.num_bytes() % 16 == 0 && reinterpret_cast<uintptr_t>(each.data) % 16 == 0;
        return Cleared{
            .data = static_cast<char*>(each.data), .num_bytes = each.num_bytes(), .first = 0, .whole = whole};
      },
      [](const Tensor& each) {
        return each.empty() || each.num_bytes() > kSmallBytes ? 0 : div_ceil(each.num_bytes(), kBytesOfBlock);
      },
      [&](const Tensors<Cleared>& group, int pieces) {
        fill_zeros_kernel<<<pieces, kThreads, 0, cuda_stream(s)>>>(group);
        check_launch("fill_zeros");
      });
}

void copy(Stream& s, Tensor to, Tensor from) {
  if (to.dtype == DType::bf16 && from.dtype == DType::f32)
    return convert(s, to.ptr<bf16>(), from.ptr<float>(), to.numel());
  if (to.dtype == DType::f32 && from.dtype == DType::bf16)
    return convert(s, to.ptr<float>(), from.ptr<bf16>(), to.numel());
  MOEBIUS_CUDA(cudaMemcpyAsync(to.data, from.data, to.num_bytes(), cudaMemcpyDefault, cuda_stream(s)));
}

void add(Stream& s, Tensor y, Tensor x) {
  const int64_t n = x.numel();
  if (y.dtype != x.dtype) return add_all(s, y.ptr<bf16>(), static_cast<const float*>(x.ptr<float>()), n);
  with_float_type(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    add_all(s, y.ptr<T>(), static_cast<const T*>(x.ptr<T>()), n);
  });
}

void add_row(Stream& s, Tensor y_SD, Tensor row_1D) {
  const int64_t n = y_SD.numel(), width = y_SD.dim(1);
  with_float_type(y_SD.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    T* y = y_SD.ptr<T>();
    const T* row = row_1D.ptr<T>();
    if (rows_are_aligned(width, sizeof(T), y, row))
      add_row_kernel<kNum><<<num_blocks(n / kNum, kThreads), kThreads, 0, cuda_stream(s)>>>(y, row, n, width);
    else
      add_row_kernel<1><<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(y, row, n, width);
  });
  check_launch("add_row");
}

void sum_rows(Stream& s, const SumRows& a) {
  const int64_t rows = a.x_TC.dim(0), width = a.x_TC.dim(1), num_partials = div_ceil(rows, SumRows::kRowsOfBlock);
  float* const partial = static_cast<float*>(a.scratch.data);
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    const T* x = a.x_TC.ptr<T>();
    const auto grid = [&](int num) { return dim3(num_blocks(width, 32 * num), narrow<int>(num_partials)); };
    if (rows_are_aligned(width, sizeof(T), x))
      sum_block_of_rows_kernel<kNum><<<grid(kNum), kThreads, 0, cuda_stream(s)>>>(partial, x, rows, width);
    else
      sum_block_of_rows_kernel<1><<<grid(1), kThreads, 0, cuda_stream(s)>>>(partial, x, rows, width);
  });
  add_partial_sums_kernel<<<num_blocks(width, kThreads), kThreads, 0, cuda_stream(s)>>>(a.sum_C.ptr<float>(), partial,
                                                                                        num_partials, width);
  check_launch("sum_rows");
}

void sum_into(Stream& s, const SumInto& a) {
  sum_into_kernel<<<1, 1024, 0, cuda_stream(s)>>>(a.out_1.ptr<double>(), a.x.ptr<float>(), a.x.numel(), a.scale);
  check_launch("sum_into");
}

void gated_add_fwd(Stream& s, const GatedAddFwd& a) {
  const int64_t width = a.x_TD.dim(1);
  const int rows = narrow<int>(a.x_TD.dim(0));
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    const Gated<T> g{.y = a.y_TD.ptr<T>(), .x = a.x_TD.ptr<T>(), .gate = a.gate_T.ptr<float>(), .width = width};
    if (rows_are_aligned(width, sizeof(T), g.y, g.x))
      gated_add_fwd_kernel<kNum><<<rows, threads_for(width, kNum), 0, cuda_stream(s)>>>(g);
    else
      gated_add_fwd_kernel<1><<<rows, threads_for(width, 1), 0, cuda_stream(s)>>>(g);
  });
  check_launch("gated_add_fwd");
}

void gated_add_bwd(Stream& s, const GatedAddBwd& a) {
  const int64_t width = a.x_TD.dim(1);
  const int rows = narrow<int>(a.x_TD.dim(0));
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    const Gated<T> g{.dx = a.dx_TD.ptr<T>(),
                     .dgate = a.dgate_T.ptr<float>(),
                     .dy = a.dy_TD.ptr<T>(),
                     .x = a.x_TD.ptr<T>(),
                     .gate = a.gate_T.ptr<float>(),
                     .width = width};
    if (rows_are_aligned(width, sizeof(T), g.dx, g.dy, g.x))
      gated_add_bwd_kernel<kNum><<<rows, threads_for(width, kNum), 0, cuda_stream(s)>>>(g);
    else
      gated_add_bwd_kernel<1><<<rows, threads_for(width, 1), 0, cuda_stream(s)>>>(g);
  });
  check_launch("gated_add_bwd");
}

void jitter(Stream& s, const Jitter& a) {
  const int64_t n = a.x_TD.numel();
  const DeviceRng any_step(Rng(a.seed, RngSite::jitter, 0, a.layer));
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    jitter_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
        a.y_TD.ptr<T>(), a.x_TD.ptr<T>(), n, a.x_TD.dim(1), a.draw_2.ptr<int64_t>(), a.row, any_step, a.eps);
  });
  check_launch("jitter");
}

void fill_normal(Stream& s, const FillNormal& a) {
  const int64_t n = a.x.numel();
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    fill_normal_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
        a.x.ptr<T>(), n, DeviceRng(a.rng), a.first_index, a.mean, a.std, a.uniform);
  });
  check_launch("fill_normal");
}

namespace {

// The memory that find_nonfinite keeps on a device, since a checkpoint calls it for thousands of tensors.
struct FirstNonfinite {
  Buffer buffer{DeviceKind::cuda, sizeof(unsigned long long)};
};

}  // namespace

// It is called outside of steps: it waits for the device, and the first call allocates memory for the result.
int64_t find_nonfinite(Stream& s, Tensor x) {
  const int64_t n = x.numel();
  auto* const first = static_cast<unsigned long long*>(op_state<FirstNonfinite>(s).buffer.data());
  unsigned long long found = 0;
  MOEBIUS_CUDA(cudaMemsetAsync(first, 0xff, sizeof found, cuda_stream(s)));  // above every index
  with_float_type(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    find_nonfinite_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(first, x.ptr<T>(), n);
  });
  check_launch("find_nonfinite");
  copy_to_host(s, &found, first, sizeof found);
  return found >= static_cast<unsigned long long>(n) ? -1 : static_cast<int64_t>(found);
}

}  // namespace moebius::cuda
