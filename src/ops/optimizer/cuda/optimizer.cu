#include <algorithm>
#include <climits>

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks of an update: each works out the coefficients once, for many elements.
constexpr int kMaxBlocks = 132 * 8;

// Tensors of one launch: all that is known of them is in the kernel's
// parameters, 4 KiB of which every driver takes.
constexpr int kMaxTensors = 56;

template <class T>
struct Tensors {
  T of[kMaxTensors];
  int num = 0;
};

// Returns the tensor that a piece belongs to; pieces of tensor i begin at of[i].first, and of[0].first is 0.
template <class T>
__device__ __forceinline__ const T& owner_of(const Tensors<T>& tensors, int piece) {
  int low = 0, high = tensors.num - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tensors.of[middle].first <= piece)
      low = middle;
    else
      high = middle - 1;
  }
  return tensors.of[low];
}

// launch(tensors, number of pieces) for up to kMaxTensors at a time. make(t): one of them, without
// `first`; pieces(t).
template <class Made, class From, class Make, class Pieces, class Launch>
void for_each_group(std::span<const From> all, Make&& make, Pieces&& pieces, Launch&& launch) {
  Tensors<Made> group;
  int first = 0;
  const auto flush = [&] {
    if (group.num > 0) launch(group, first);
    group.num = first = 0;
  };
  for (const From& t : all) {
    const int num = narrow<int>(pieces(t));
    if (num == 0) continue;
    if (group.num == kMaxTensors || first > INT_MAX - num) flush();
    group.of[group.num] = make(t);
    group.of[group.num++].first = first;
    first += num;
  }
  flush();
}

// A piece is a chunk with a partial sum of its own.
struct Squares {
  const float* x;
  int64_t n, chunk;
  int first, num_partials;
  bool whole;  // in vectors of four
};
static_assert(sizeof(Tensors<Squares>) <= 4000);

template <int kNum>
__device__ double squares_of_thread(const float* x, int64_t begin, int64_t end) {
  double sums[kNum] = {};
#pragma unroll 8
  for (int64_t i = begin + threadIdx.x * kNum; i < end; i += kThreads * kNum) {
    float v[kNum];
    load(v, x + i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) sums[j] += static_cast<double>(v[j]) * static_cast<double>(v[j]);
  }
#pragma unroll
  for (int j = 1; j < kNum; ++j) sums[0] += sums[j];
  return sums[0];
}

__global__ void __launch_bounds__(kThreads)
    partial_squares_kernel(double* partial, const __grid_constant__ Tensors<Squares> tensors) {
  __shared__ double shared[32];
  const Squares& t = owner_of(tensors, blockIdx.x);
  const int64_t begin = (static_cast<int>(blockIdx.x) - t.first) * t.chunk, end = min(t.n, begin + t.chunk);
  const double mine = t.whole ? squares_of_thread<4>(t.x, begin, end) : squares_of_thread<1>(t.x, begin, end);
  const double sum = block_sum(mine, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Tensor by tensor, so that the order of the sum does not depend on which share a launch.
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(double* to, const double* partial, const __grid_constant__ Tensors<Squares> tensors) {
  __shared__ double shared[32];
  for (int i = 0; i < tensors.num; ++i) {
    const Squares& t = tensors.of[i];
    double sum = 0;
    for (int p = threadIdx.x; p < t.num_partials; p += kThreads) sum += partial[t.first + p];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *to += sum;
    __syncthreads();  // shared is free again
  }
}

__global__ void clip_scale_kernel(float* norm, float* scale, const double* sum_squares, float clip) {
  const double exact = sqrt(*sum_squares);
  const float seen = static_cast<float>(exact);
  // The caller sees the norm in f32: what is infinite there must stop the step, though a
  // double holds it.
  *norm = seen;
  *scale = !isfinite(seen) ? __int_as_float(0x7fc00000)
           : clip > 0      ? static_cast<float>(fmin(1.0, clip / (exact + 1e-6)))
                           : 1.0f;
}

// A piece is kPiece elements.
template <class T>
struct Update {
  T* param;
  float *master, *m, *v;  // m and v are null where the optimizer has none
  const float* grad;
  int64_t n;
  float weight_decay;
  int first;
  bool whole;  // in vectors of four
};
constexpr int kPiece = kThreads * 4 * 4;
static_assert(sizeof(Tensors<Update<float>>) <= 4000);

struct StepScalars {
  const float* scale;
  const double* lr_and_step;  // [2], or null: then lr and step below
  int64_t step;
  float lr, beta1, beta2, eps;
};

// The scalars of a step, worked out in double.
struct Coefficients {
  float lr, one_minus_beta1, one_minus_beta2, rate, inverse_sqrt_v;
};

__device__ Coefficients coefficients_of(const StepScalars& u) {
  const float lr = u.lr_and_step ? static_cast<float>(u.lr_and_step[0]) : u.lr;
  const double step = u.lr_and_step ? u.lr_and_step[1] : static_cast<double>(u.step), beta1 = u.beta1, beta2 = u.beta2;
  return {.lr = lr,
          .one_minus_beta1 = static_cast<float>(1.0 - beta1),
          .one_minus_beta2 = static_cast<float>(1.0 - beta2),
          .rate = static_cast<float>(lr / (1.0 - pow(beta1, step))),
          .inverse_sqrt_v = static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, step)))};
}

// kNum elements a thread at a time.
template <int kNum, class T>
__device__ __forceinline__ void update_piece(const Update<T>& t, const StepScalars& u, const Coefficients& c,
                                             float scale, int64_t begin) {
  const float keep = static_cast<float>(1.0 - static_cast<double>(c.lr) * t.weight_decay);
  const int64_t end = min(t.n, begin + kPiece);
  for (int64_t i = begin + threadIdx.x * kNum; i < end; i += kThreads * kNum) {
    float g[kNum], m[kNum], v[kNum], master[kNum];
    load(g, t.grad + i);
    load(m, t.m + i);
    load(v, t.v + i);
    load(master, t.master + i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
      g[j] *= scale;
      m[j] = u.beta1 * m[j] + c.one_minus_beta1 * g[j];
      v[j] = u.beta2 * v[j] + c.one_minus_beta2 * g[j] * g[j];
      master[j] = keep * master[j] - c.rate * m[j] / (sqrtf(v[j]) * c.inverse_sqrt_v + u.eps);
    }
    store(t.m + i, m);
    store(t.v + i, v);
    store(t.master + i, master);
    store(t.param + i, master);
  }
}

template <int kNum, class T>
__device__ __forceinline__ void update_sgd_piece(const Update<T>& t, float momentum, float lr, float scale,
                                                 int64_t begin) {
  const float keep = static_cast<float>(1.0 - static_cast<double>(lr) * t.weight_decay);
  const int64_t end = min(t.n, begin + kPiece);
  for (int64_t i = begin + threadIdx.x * kNum; i < end; i += kThreads * kNum) {
    float g[kNum], m[kNum], master[kNum];
    load(g, t.grad + i);
    load(master, t.master + i);
    if (t.m) load(m, t.m + i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
      g[j] *= scale;
      if (t.m) g[j] = m[j] = momentum * m[j] + g[j];
      master[j] = keep * master[j] - lr * g[j];
    }
    if (t.m) store(t.m + i, m);
    store(t.master + i, master);
    store(t.param + i, master);
  }
}

// Blocks take turns with the pieces of all tensors. lr_1 may be null: then it is lr.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    sgd_kernel(const __grid_constant__ Tensors<Update<T>> tensors, const float* scale_1, const double* lr_1, float lr,
               float momentum, int num_pieces) {
  const float scale = *scale_1;
  if (isnan(scale)) return;
  if (lr_1) lr = static_cast<float>(*lr_1);
  for (int piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    const Update<T>& t = owner_of(tensors, piece);
    const int64_t begin = static_cast<int64_t>(piece - t.first) * kPiece;
    if (t.whole)
      update_sgd_piece<4>(t, momentum, lr, scale, begin);
    else
      update_sgd_piece<1>(t, momentum, lr, scale, begin);
  }
}

// Blocks take turns with the pieces of all tensors.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    adamw_kernel(const __grid_constant__ Tensors<Update<T>> tensors, StepScalars u, int num_pieces) {
  __shared__ Coefficients shared;
  const float scale = *u.scale;
  if (isnan(scale)) return;
  if (threadIdx.x == 0) shared = coefficients_of(u);
  __syncthreads();
  const Coefficients c = shared;
  for (int piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    const Update<T>& t = owner_of(tensors, piece);
    const int64_t begin = static_cast<int64_t>(piece - t.first) * kPiece;
    if (t.whole)
      update_piece<4>(t, u, c, scale, begin);
    else
      update_piece<1>(t, u, c, scale, begin);
  }
}

// launch(tensors, blocks, number of pieces) for the tensors whose parameters are of type T.
template <class T, class From, class Moments, class Launch>
void update_all(Stream& s, std::span<const From> tensors, Moments&& set_moments, Launch&& launch) {
  const auto make = [&](const From& t) {
    Update<T> u{.param = t.param_n.template ptr<T>(),
                .master = t.master_n.template ptr<float>(),
                .grad = t.grad_n.template ptr<float>(),
                .n = t.master_n.numel(),
                .weight_decay = t.weight_decay};
    set_moments(u, t);
    u.whole = is_whole(u.n, 4, u.param, u.master, u.m, u.v, u.grad);  // null is aligned
    return u;
  };
  const auto pieces = [](const From& t) {
    return t.param_n.dtype == dtype_of<T> ? div_ceil(t.master_n.numel(), int64_t{kPiece}) : 0;
  };
  for_each_group<Update<T>>(tensors, make, pieces, [&](const Tensors<Update<T>>& group, int num_pieces) {
    launch(group, std::min(num_pieces, limited_blocks(s, kMaxBlocks)), num_pieces);
  });
}

template <class T>
void adamw_of(Stream& s, const AdamW& a, const StepScalars& step) {
  const auto set_moments = [](Update<T>& u, const AdamWTensors& t) {
    u.m = t.m_n.ptr<float>();
    u.v = t.v_n.ptr<float>();
  };
  update_all<T>(s, a.tensors, set_moments, [&](const Tensors<Update<T>>& group, int blocks, int num_pieces) {
    adamw_kernel<<<blocks, kThreads, 0, cuda_stream(s)>>>(group, step, num_pieces);
  });
}

template <class T>
void sgd_of(Stream& s, const Sgd& a) {
  const auto set_moments = [&](Update<T>& u, const SgdTensors& t) {
    u.m = a.momentum == 0 ? nullptr : t.m_n.ptr<float>();
  };
  const double* lr_1 = a.lr_and_step_2.empty() ? nullptr : a.lr_and_step_2.ptr<double>();
  update_all<T>(s, a.tensors, set_moments, [&](const Tensors<Update<T>>& group, int blocks, int num_pieces) {
    sgd_kernel<<<blocks, kThreads, 0, cuda_stream(s)>>>(group, a.scale_1.ptr<float>(), lr_1, a.lr, a.momentum,
                                                        num_pieces);
  });
}

}  // namespace

void sum_squares(Stream& s, const SumSquares& a) {
  double* partial = a.partial_P.ptr<double>();
  const auto make = [](const Tensor& x) {
    const int64_t n = x.numel(), num = SumSquares::num_partials(x);
    // Whole vectors, so that each chunk starts where one does.
    return Squares{.x = x.ptr<float>(),
                   .n = n,
                   .chunk = div_ceil(div_ceil(n, num), 4) * 4,
                   .num_partials = static_cast<int>(num),
                   .whole = is_whole(n, 4, x.ptr<float>())};
  };
  const auto pieces = [](const Tensor& x) { return SumSquares::num_partials(x); };
  for_each_group<Squares>(a.x, make, pieces, [&](const Tensors<Squares>& group, int num_partials) {
    partial_squares_kernel<<<num_partials, kThreads, 0, cuda_stream(s)>>>(partial, group);
    add_partials_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(a.sum_1.ptr<double>(), partial, group);
    partial += num_partials;
  });
  check_launch("sum_squares");
}

void clip_scale(Stream& s, const ClipScale& a) {
  clip_scale_kernel<<<1, 1, 0, cuda_stream(s)>>>(a.norm_1.ptr<float>(), a.scale_1.ptr<float>(),
                                                 a.sum_squares_1.ptr<double>(), a.clip);
  check_launch("clip_scale");
}

void adamw(Stream& s, const AdamW& a) {
  const StepScalars step{.scale = a.scale_1.ptr<float>(),
                         .lr_and_step = a.lr_and_step_2.empty() ? nullptr : a.lr_and_step_2.ptr<double>(),
                         .step = a.step,
                         .lr = a.lr,
                         .beta1 = a.beta1,
                         .beta2 = a.beta2,
                         .eps = a.eps};
  adamw_of<float>(s, a, step);
  adamw_of<bf16>(s, a, step);
  check_launch("adamw");
}

void sgd(Stream& s, const Sgd& a) {
  sgd_of<float>(s, a);
  sgd_of<bf16>(s, a);
  check_launch("sgd");
}

}  // namespace moebius::cuda
