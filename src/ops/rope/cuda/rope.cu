#include <algorithm>
#include <cmath>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/rope/cuda/all_heads.h"
#include "ops/rope/cuda/args.h"
#include "ops/rope/cuda/pairs.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsAtOnce = 4;

__global__ void rope_table_kernel(float* cos_sin, int64_t positions, int64_t width, double theta) {
  const int64_t half = width / 2, i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= positions * half) return;
  const int64_t p = i / half, j = i % half;
  const double angle = static_cast<double>(p) * pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(width));
  cos_sin[p * width + j] = static_cast<float>(cos(angle));
  cos_sin[p * width + half + j] = static_cast<float>(sin(angle));
}

template <class T>
struct Fwd {
  Parts<T> out;
  const T *qkv, *q_norm, *k_norm;
  Heads g;
};

// A group owns kHeadsAtOnce neighbouring heads of one row.
template <class T, int kNum, int kVectors, bool kNorm>
__global__ void __launch_bounds__(kThreads, kVectors == 1 ? 3 : 1) rope_fwd_kernel(Fwd<T> f) {
  const Heads& g = f.g;
  const int per_row = g.per_row(), lane = threadIdx.x % g.num_lanes;
  const int groups_of_row = (per_row + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const int64_t group = int64_t{blockIdx.x} * (kThreads / g.num_lanes) + threadIdx.x / g.num_lanes;
  const int64_t t = min(quotient(group, groups_of_row), g.rows - 1);
  // Lanes without work take part in the sums over their warp.
  const int first =
      group < g.rows * groups_of_row ? static_cast<int>(group - t * groups_of_row) * kHeadsAtOnce : per_row;
  using P = Pairs<kNum, kVectors>;
  typename P::template InMemory<T> raw[kHeadsAtOnce];
  let_next_start();
  if constexpr (kNorm) {  // their weights are in the L2 cache when the heads are there
    const int column = static_cast<int>(threadIdx.x) * 128 / int{sizeof(T)};
    if (column < g.width) {
      if (f.q_norm) prefetch_line(f.q_norm + column);
      if (f.k_norm) prefetch_line(f.k_norm + column);
    }
  }
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kHeadsAtOnce; ++i) {
    raw[i] = P::fetch_from(f.qkv + (t * per_row + first + i) * g.width, g, lane, first + i < per_row);
  }
  const P cos_sin = angles_of<kNum, kVectors>(g, t, lane);
#pragma unroll
  for (int i = 0; i < kHeadsAtOnce; ++i) {
    const int h = first + i;
    P x = P::of(raw[i]);
    if constexpr (kNorm) {
      const float rstd = rsqrtf(group_sum(x.dot(x), g.num_lanes) / static_cast<float>(g.width) + g.eps);
      const T* norm = h < g.heads ? f.q_norm : h < g.heads + g.kv_heads ? f.k_norm : nullptr;
      if (norm) {
        x.each(P::of(P::fetch_from(norm, g, lane)),
               [&](float& mine, float weight) { mine = weight * rounded<T>(mine * rstd); });
      }
    }
    if (h >= per_row) continue;
    if (h < g.heads + g.kv_heads) x.turn(cos_sin, 1.0f);
    x.store_to(f.out.head(g, t, h), g, lane);
  }
}

// The heads of one kind, q, k or v, in the backward pass: n per row, from column `first` of qkv, counted in heads.
template <class T>
struct Kind {
  const T *dy, *norm;
  int n, first;
};

template <class T>
struct Bwd {
  T* dqkv;
  float* partial;
  const T* qkv;
  Kind<T> q, k, v;
  Heads g;
};

constexpr int kHeadsOfUnit = 8;

// The groups of the block process the heads of one kind in the block's rows in turn, a unit of neighbouring heads at a
// time, and keep their part of the norm's gradient in registers. The next head is loaded while one is processed.
//   g = dy turned back;  dw += g xhat;  dx = rstd (g w - xhat mean(g w xhat)).
template <bool kNorm, bool kTurn, class T, int kNum, int kVectors>
__device__ __forceinline__ void bwd_heads(Pairs<kNum, kVectors>& dw, const Bwd<T>& b, const Kind<T>& kind,
                                          int64_t begin, int num_rows) {
  using P = Pairs<kNum, kVectors>;
  const Heads& g = b.g;
  const int lane = threadIdx.x % g.num_lanes, groups = kThreads / g.num_lanes;
  const int units = (kind.n + kHeadsOfUnit - 1) / kHeadsOfUnit, num_items = num_rows * units;
  typename P::template InMemory<T> w, next_dy, next_x;
  if constexpr (kNorm) w = P::fetch_from(kind.norm, g, lane);
  // All groups do the same number of rounds, so that all lanes of a warp take part in its sums.
  for (int round = 0; round < num_items; round += groups) {
    const int item = round + threadIdx.x / g.num_lanes, row = item / units, h = (item - row * units) * kHeadsOfUnit;
    const int num_heads = item < num_items ? min(kHeadsOfUnit, kind.n - h) : 0;
    const int64_t t = begin + (num_heads > 0 ? row : 0);
    const T* dy_at = kind.dy + (t * kind.n + h) * g.width;
    const int64_t at = (t * g.per_row() + kind.first + h) * g.width;
    const auto fetch_head = [&](int i) {
      next_dy = P::fetch_from(dy_at + i * g.width, g, lane, i < num_heads);
      if constexpr (kNorm) next_x = P::fetch_from(b.qkv + at + i * g.width, g, lane, i < num_heads);
    };
    fetch_head(0);
    P angles;
    if constexpr (kTurn) angles = angles_of<kNum, kVectors>(g, t, lane);
    for (int i = 0; i < min(kHeadsOfUnit, kind.n); ++i) {
      P dy = P::of(next_dy), x;
      if constexpr (kNorm) x = P::of(next_x);
      fetch_head(i + 1);
      if constexpr (kTurn) dy.turn(angles, -1.0f);
      if constexpr (kNorm) {
        const float rstd = rsqrtf(group_sum(x.dot(x), g.num_lanes) / static_cast<float>(g.width) + g.eps);
        x.each(x, [&](float& mine, float) { mine *= rstd; });
        // Heads that do not exist are zeros and add nothing.
        dw.add_products(dy, x);
        dy.each(P::of(w), [](float& mine, float weight) { mine *= weight; });
        const float mean = group_sum(dy.dot(x), g.num_lanes) / static_cast<float>(g.width);
        dy.each(x, [&](float& mine, float xhat) { mine = rstd * (mine - xhat * mean); });
      }
      if (i < num_heads) dy.store_to(b.dqkv + at + i * g.width, g, lane);
    }
  }
}

// Adds the sums of the block's groups for each column, in order.
template <int kNum, int kVectors>
__device__ __forceinline__ void store_norm_sums(float* partial, const Pairs<kNum, kVectors>& dw, const Heads& g) {
  constexpr int kPairs = kNum * kVectors;
  __shared__ float sums[kPairs][kThreads];
  const int half = g.width / 2;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      sums[i][threadIdx.x] = part ? dw.b[i / kNum][i % kNum] : dw.a[i / kNum][i % kNum];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < half; column += kThreads) {
      const int vector = column / kNum, lane = vector % g.num_lanes;
      const int i = vector / g.num_lanes * kNum + column % kNum;
      float sum = 0;
      for (int thread = lane; thread < kThreads; thread += g.num_lanes) sum += sums[i][thread];
      partial[part * half + column] = sum;
    }
  }
}

// A block owns a chunk of rows.
template <class T, int kNum, int kVectors, bool kNorm>
__global__ void __launch_bounds__(kThreads, kVectors == 1 ? 2 : 1) rope_bwd_kernel(Bwd<T> b) {
  const int64_t begin = blockIdx.x * b.g.rows / gridDim.x, end = (blockIdx.x + int64_t{1}) * b.g.rows / gridDim.x;
  const int num_rows = static_cast<int>(end - begin);
  float* partial = b.partial + blockIdx.x * 2 * b.g.width;
  const auto rotated = [&](const Kind<T>& kind, float* sums) {
    Pairs<kNum, kVectors> dw = {};
    if (kNorm && kind.norm) {
      bwd_heads<true, true>(dw, b, kind, begin, num_rows);
      store_norm_sums(sums, dw, b.g);
    } else {
      bwd_heads<false, true>(dw, b, kind, begin, num_rows);
    }
  };
  rotated(b.q, partial);
  rotated(b.k, partial + b.g.width);
  Pairs<kNum, kVectors> none;
  bwd_heads<false, false>(none, b, b.v, begin, num_rows);
}

constexpr int kScalarVectors = 8;

// Returns the number of lanes that a head has with kNum x kVectors pairs a lane.
int lanes_for(const char* who, const Heads& g, int pairs) {
  int lanes = 1;
  while (lanes * pairs < g.width / 2) lanes *= 2;
  MOEBIUS_CHECK(usage, lanes <= 32, "{}: on a GPU heads are at most {} wide; got {}", who, 2 * 32 * pairs, g.width);
  return lanes;
}

// Uses vectors if half a head consists of whole vectors for at most a warp.
template <class T, class... P>
bool takes_vectors(const Heads& g, const P*... p) {
  constexpr int kNum = kPerVector<T>;
  return g.width / 2 % kNum == 0 && g.width / 2 <= 32 * kNum && rows_are_aligned(g.width, sizeof(T), p...) &&
         reinterpret_cast<uintptr_t>(g.cos_sin) % 16 == 0;
}

template <class T, int kNum, int kVectors>
void launch_fwd(Stream& s, Fwd<T> f) {
  f.g.num_lanes = lanes_for("rope_fwd", f.g, kNum * kVectors);
  const int64_t groups = f.g.rows * div_ceil(f.g.per_row(), kHeadsAtOnce);
  const LaunchShape how{.blocks = static_cast<unsigned>(num_blocks(groups, kThreads / f.g.num_lanes)),
                        .threads = kThreads};
  const bool early = f.g.rows <= kEarlyRows;
  if (f.q_norm || f.k_norm)
    launch_kernel(s, early, how, rope_fwd_kernel<T, kNum, kVectors, true>, f);
  else
    launch_kernel(s, early, how, rope_fwd_kernel<T, kNum, kVectors, false>, f);
}

template <class T, int kNum, int kVectors>
void launch_bwd(Stream& s, Bwd<T> b, int64_t num_partials) {
  b.g.num_lanes = lanes_for("rope_bwd", b.g, kNum * kVectors);
  const int blocks = narrow<int>(num_partials);
  if (b.q.norm || b.k.norm)
    rope_bwd_kernel<T, kNum, kVectors, true><<<blocks, kThreads, 0, cuda_stream(s)>>>(b);
  else
    rope_bwd_kernel<T, kNum, kVectors, false><<<blocks, kThreads, 0, cuda_stream(s)>>>(b);
}

template <class Launch>
void launch_scalars(Stream& s, const char* op, const Heads& g, DType dtype, Launch&& launch) {
  if (dtype == DType::bf16)
    note_fallback_kernel(s, op, fmt::format("vectors are read of heads of a multiple of 16; got {}", g.width));
  launch();
}

template <class T>
const T* pointer_or_null(const Tensor& t) {
  return t.empty() ? nullptr : t.ptr<T>();
}

}  // namespace

void rope_table(Stream& s, const RopeTable& a) {
  const int64_t positions = a.cos_sin_Pd.dim(0), width = a.cos_sin_Pd.dim(1);
  rope_table_kernel<<<num_blocks(positions * (width / 2), kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.cos_sin_Pd.ptr<float>(), positions, width, a.theta);
  check_launch("rope_table");
}

void rope_fwd(Stream& s, const RopeFwd& a) {
  if (has_norms_of_all_heads(a)) return rope_all_heads_fwd(s, a);
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Fwd<T> f{.out = {a.q_THd.ptr<T>(), a.k_TGd.ptr<T>(), a.v_TGd.ptr<T>()},
                   .qkv = a.qkv_TC.ptr<T>(),
                   .q_norm = pointer_or_null<T>(a.q_norm_A),
                   .k_norm = pointer_or_null<T>(a.k_norm_B),
                   .g = heads_of(a, a.q_THd, a.k_TGd)};
    if (takes_vectors<T>(f.g, f.out.q, f.out.k, f.out.v, f.qkv, f.q_norm, f.k_norm))
      launch_fwd<T, kPerVector<T>, 1>(s, f);
    else
      launch_scalars(s, "rope_fwd", f.g, dtype_of<T>, [&] { launch_fwd<T, 1, kScalarVectors>(s, f); });
  });
  check_launch("rope_fwd");
}

void rope_bwd(Stream& s, const RopeBwd& a) {
  if (has_norms_of_all_heads(a)) return rope_all_heads_bwd(s, a);
  const int64_t width = a.dq_THd.dim(2), num_partials = RopeBwd::num_partials(a, s);
  const bool norm = !a.q_norm_A.empty() || !a.k_norm_B.empty();
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Heads g = heads_of(a, a.dq_THd, a.dk_TGd);
    const Bwd<T> b{.dqkv = a.dqkv_TC.ptr<T>(),
                   .partial = norm ? a.partial_PW.ptr<float>() : nullptr,
                   .qkv = a.qkv_TC.ptr<T>(),
                   .q = {a.dq_THd.ptr<T>(), pointer_or_null<T>(a.q_norm_A), g.heads, 0},
                   .k = {a.dk_TGd.ptr<T>(), pointer_or_null<T>(a.k_norm_B), g.kv_heads, g.heads},
                   .v = {a.dv_TGd.ptr<T>(), nullptr, g.kv_heads, g.heads + g.kv_heads},
                   .g = g};
    if (takes_vectors<T>(g, b.dqkv, b.q.dy, b.k.dy, b.v.dy, b.qkv, b.q.norm, b.k.norm))
      launch_bwd<T, kPerVector<T>, 1>(s, b, num_partials);
    else
      launch_scalars(s, "rope_bwd", g, dtype_of<T>, [&] { launch_bwd<T, 1, kScalarVectors>(s, b, num_partials); });
  });
  check_launch("rope_bwd");
  const auto add_sums = [&](const Tensor& norm, const Tensor& dnorm, int64_t first) {
    if (norm.empty()) return;
    add_rows(cuda_stream(s), {.sum = dnorm.ptr<float>(),
                              .partial = a.partial_PW.ptr<float>() + first,
                              .num_partials = num_partials,
                              .width = width,
                              .ld = 2 * width});
  };
  add_sums(a.q_norm_A, a.dq_norm_A, 0);
  add_sums(a.k_norm_B, a.dk_norm_B, width);
}

}  // namespace moebius::cuda
