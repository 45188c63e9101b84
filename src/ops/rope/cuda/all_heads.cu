// A block owns a row, of which it reads q, k and v once, and keeps q and k in registers until their sums are known. In the
// backward pass it owns a chunk of rows, one after the other.
#include "ops/rope/cuda/all_heads.h"

#include <numeric>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/rope/cuda/args.h"
#include "ops/rope/cuda/pairs.h"

namespace moebius::cuda {
namespace {

constexpr int kMaxThreads = 512, kMaxWarps = kMaxThreads / 32;

template <class T>
struct Fwd {
  Parts<T> out;
  const T *qkv, *q_norm, *k_norm;
  Heads g;
};

template <class T>
struct Bwd {
  T* dqkv;
  float* partial;
  Parts<const T> dy;
  const T *qkv, *q_norm, *k_norm;
  Heads g;
};

// Returns the weights of head h, of q or k.
template <class Op>
__device__ __forceinline__ auto weights_of(const Op& a, int h) {
  return h < a.g.heads ? a.q_norm + h * a.g.width : a.k_norm + (h - a.g.heads) * a.g.width;
}

__device__ __forceinline__ const float* angles_at(const Heads& g, int32_t pos) {
  require(0 <= pos && pos < g.positions);
  return g.cos_sin + int64_t{pos} * g.width;
}

// The sums of a row for q and for k.
template <int kSums>
struct Sums {
  float q[kSums] = {}, k[kSums] = {};

  __device__ __forceinline__ void add(bool is_q, int i, float x) {
    q[i] += is_q ? x : 0.0f;
    k[i] += is_q ? 0.0f : x;
  }
  __device__ __forceinline__ float of(bool is_q, int i) const { return is_q ? q[i] : k[i]; }
  // Adds up those of the block's threads, in a fixed order. A later call needs other numbers in shared memory, or a
  // barrier before it.
  __device__ __forceinline__ void add_up(Sums (&shared)[kMaxWarps]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) q[i] = warp_sum(q[i]), k[i] = warp_sum(k[i]);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = *this;
    __syncthreads();
    *this = shared[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
      const Sums other = shared[warp];
#pragma unroll
      for (int i = 0; i < kSums; ++i) q[i] += other.q[i], k[i] += other.k[i];
    }
  }
};

// Returns 1 / sqrt(mean square + eps) of q or k.
__device__ __forceinline__ float rstd_of(const Heads& g, bool is_q, float squares) {
  return rsqrtf(squares / static_cast<float>((is_q ? g.heads : g.kv_heads) * g.width) + g.eps);
}

// Heads first, first + step, ... of q and k are those of a group of lanes; a thread has the pairs of one lane. The
// vectors of v are the threads' in turn.
template <class T, int kVectors>
struct Share {
  static constexpr int kNum = kPerVector<T>;
  using P = Pairs<kNum, 1>;
  using InMemory = typename P::template InMemory<T>;
  int lane, first, step;

  __device__ __forceinline__ explicit Share(const Heads& g)
      : lane(threadIdx.x % g.num_lanes), first(threadIdx.x / g.num_lanes), step(blockDim.x / g.num_lanes) {}
  __device__ __forceinline__ int head(int v) const { return first + v * step; }
  static __device__ __forceinline__ bool is_rotated(const Heads& g, int h) { return h < g.heads + g.kv_heads; }
  // Returns the first element of the v-th vector in a row of v.
  static __device__ __forceinline__ int column(int v) {
    return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kNum;
  }
  static __device__ __forceinline__ bool is_of_v(const Heads& g, int v) { return column(v) < g.kv_heads * g.width; }
};

template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) fwd_kernel(Fwd<T> f) {
  using S = Share<T, kVectors>;
  using P = typename S::P;
  __shared__ Sums<1> shared[kMaxWarps];
  const Heads& g = f.g;
  const S own(g);
  const int64_t t = blockIdx.x;
  const T* row = f.qkv + t * g.per_row() * g.width;
  const T* v_row = row + (g.heads + g.kv_heads) * g.width;
  typename S::InMemory raw[kVectors], weights[kVectors];
  Raw<T, S::kNum> of_v[kVectors];
  let_next_start();
  wait_for_inputs();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    raw[v] = P::fetch_from(row + own.head(v) * g.width, g, own.lane, S::is_rotated(g, own.head(v)));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) of_v[v] = fetch<S::kNum>(v_row + S::column(v), S::is_of_v(g, v));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weights[v] = P::fetch_from(weights_of(f, own.head(v)), g, own.lane, S::is_rotated(g, own.head(v)));
  }
  const P angles = P::of(P::fetch_from(angles_at(g, g.pos[t]), g, own.lane));
  P x[kVectors];
  Sums<1> squares;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    x[v] = P::of(raw[v]);
    squares.add(own.head(v) < g.heads, 0, x[v].dot(x[v]));
  }
  T* v_out = f.out.v + t * g.kv_heads * g.width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (S::is_of_v(g, v)) *reinterpret_cast<Raw<T, S::kNum>*>(v_out + S::column(v)) = of_v[v];
  }
  squares.add_up(shared);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int h = own.head(v);
    const float rstd = rstd_of(g, h < g.heads, squares.of(h < g.heads, 0));
    x[v].each(P::of(weights[v]), [&](float& mine, float weight) { mine = weight * rounded<T>(mine * rstd); });
    x[v].turn(angles, 1.0f);
    if (S::is_rotated(g, h)) x[v].store_to(f.out.head(g, t, h), g, own.lane);
  }
}

// The next row is loaded while one is processed.
//   g = dy turned back;  dw += g xhat;  dx = rstd (g w - xhat mean(g w xhat)).
template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) bwd_kernel(Bwd<T> b) {
  using S = Share<T, kVectors>;
  using P = typename S::P;
  __shared__ Sums<2> shared[2][kMaxWarps];
  const Heads& g = b.g;
  const S own(g);
  const int64_t begin = blockIdx.x * g.rows / gridDim.x, end = (blockIdx.x + int64_t{1}) * g.rows / gridDim.x;
  const int64_t columns = g.per_row() * g.width, of_v = g.kv_heads * g.width;
  typename S::InMemory next_dy[kVectors], next_x[kVectors];
  typename P::template InMemory<float> next_angles;
  Raw<T, S::kNum> next_v[kVectors];
  const T *dy_at[kVectors], *w_at[kVectors], *dv_at = b.dy.v + begin * of_v + S::column(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) dy_at[v] = b.dy.head(g, begin, own.head(v)), w_at[v] = weights_of(b, own.head(v));
  int32_t next_pos = g.pos[begin];
  int64_t next_at = begin * columns;
  const auto fetch_row = [&](int64_t t) {
    const bool exists = t < end;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int h = own.head(v);
      const bool valid = exists && S::is_rotated(g, h);
      next_dy[v] = P::fetch_from(dy_at[v], g, own.lane, valid);
      next_x[v] = P::fetch_from(b.qkv + next_at + h * g.width, g, own.lane, valid);
      dy_at[v] += (h < g.heads ? g.heads : g.kv_heads) * g.width;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      next_v[v] = fetch<S::kNum>(dv_at + (S::column(v) - S::column(0)), exists && S::is_of_v(g, v));
    }
    dv_at += of_v;
    next_at += columns;
    if (!exists) return;
    next_angles = P::fetch_from(angles_at(g, next_pos), g, own.lane);
    if (t + 1 < end) next_pos = g.pos[t + 1];
  };
  fetch_row(begin);
  P dw[kVectors] = {};
  for (int64_t t = begin; t < end; ++t) {
    P dy[kVectors];
    typename S::InMemory raw_x[kVectors], weights[kVectors];  // the weights would take registers for all rows
    T* dx_row = b.dqkv + (next_at - columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = P::fetch_from(w_at[v], g, own.lane, S::is_rotated(g, own.head(v)));
      raw_x[v] = next_x[v];
      dy[v] = P::of(next_dy[v]);
      dy[v].turn(P::of(next_angles), -1.0f);
      if (S::is_of_v(g, v)) {
        *reinterpret_cast<Raw<T, S::kNum>*>(dx_row + (columns - of_v) + S::column(v)) = next_v[v];
      }
    }
    fetch_row(t + 1);
    // Heads that do not exist are zeros and add nothing.
    Sums<2> sums;  // of squares, and of products of x with the gradient of xhat
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const P x = P::of(raw_x[v]);
      P dxhat = dy[v];
      dxhat.each(P::of(weights[v]), [](float& mine, float weight) { mine *= weight; });
      sums.add(own.head(v) < g.heads, 0, x.dot(x));
      sums.add(own.head(v) < g.heads, 1, dxhat.dot(x));
    }
    sums.add_up(shared[t % 2]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int h = own.head(v);
      const bool is_q = h < g.heads;
      const float rstd = rstd_of(g, is_q, sums.of(is_q, 0));
      const float mean = rstd * sums.of(is_q, 1) / static_cast<float>((is_q ? g.heads : g.kv_heads) * g.width);
      P xhat = P::of(raw_x[v]);
      xhat.each(xhat, [&](float& mine, float) { mine *= rstd; });
      dw[v].add_products(dy[v], xhat);
      dy[v].each(P::of(weights[v]), [](float& mine, float weight) { mine *= weight; });
      dy[v].each(xhat, [&](float& mine, float x) { mine = rstd * (mine - x * mean); });
      if (S::is_rotated(g, h)) dy[v].store_to(dx_row + h * g.width, g, own.lane);
    }
  }
  float* partial = b.partial + blockIdx.x * int64_t{g.heads + g.kv_heads} * g.width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (S::is_rotated(g, own.head(v))) dw[v].store_to(partial + own.head(v) * g.width, g, own.lane);
  }
}

// The fallback kernels take any shape, an element at a time, and read each row twice.

// Calls fn(head, offset in a head) for the pairs of q and k that are this thread's.
template <class F>
__device__ __forceinline__ void each_pair(const Heads& g, F&& fn) {
  const int half = g.width / 2, num_pairs = (g.heads + g.kv_heads) * half;
  for (int p = threadIdx.x; p < num_pairs; p += blockDim.x) fn(p / half, p % half);
}

template <class T>
__device__ __forceinline__ void copy_elements(T* to, const T* from, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

template <class T>
__device__ __forceinline__ Pairs<1, 1> pair_at(const T* head, const Heads& g, int i) {
  return Pairs<1, 1>::of(Pairs<1, 1>::fetch_from(head, g, i));
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1) any_fwd_kernel(Fwd<T> f) {
  __shared__ Sums<1> shared[kMaxWarps];
  const Heads& g = f.g;
  const int64_t t = blockIdx.x;
  const T* row = f.qkv + t * g.per_row() * g.width;
  const float* angles = angles_at(g, g.pos[t]);
  Sums<1> squares;
  each_pair(g, [&](int h, int i) {
    const Pairs<1, 1> x = pair_at(row + h * g.width, g, i);
    squares.add(h < g.heads, 0, x.dot(x));
  });
  squares.add_up(shared);
  each_pair(g, [&](int h, int i) {
    const float rstd = rstd_of(g, h < g.heads, squares.of(h < g.heads, 0));
    Pairs<1, 1> x = pair_at(row + h * g.width, g, i);
    x.each(pair_at(weights_of(f, h), g, i),
           [&](float& mine, float weight) { mine = weight * rounded<T>(mine * rstd); });
    x.turn(pair_at(angles, g, i), 1.0f);
    x.store_to(f.out.head(g, t, h), g, i);
  });
  const int of_v = g.kv_heads * g.width;
  copy_elements(f.out.v + t * of_v, row + (g.heads + g.kv_heads) * g.width, of_v);
}

// The block's sums of the norms' gradients are in its row of partial, where each column is one thread's.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1) any_bwd_kernel(Bwd<T> b) {
  __shared__ Sums<2> shared[2][kMaxWarps];
  const Heads& g = b.g;
  const int64_t begin = blockIdx.x * g.rows / gridDim.x, end = (blockIdx.x + int64_t{1}) * g.rows / gridDim.x;
  float* partial = b.partial + blockIdx.x * int64_t{g.heads + g.kv_heads} * g.width;
  each_pair(g, [&](int h, int i) { Pairs<1, 1>{}.store_to(partial + h * g.width, g, i); });
  for (int64_t t = begin; t < end; ++t) {
    const T* row = b.qkv + t * g.per_row() * g.width;
    T* dx_row = b.dqkv + t * g.per_row() * g.width;
    const float* angles = angles_at(g, g.pos[t]);
    const auto gradient_of = [&](int h, int i) {
      Pairs<1, 1> dy = pair_at(b.dy.head(g, t, h), g, i);
      dy.turn(pair_at(angles, g, i), -1.0f);
      return dy;
    };
    Sums<2> sums;
    each_pair(g, [&](int h, int i) {
      const Pairs<1, 1> x = pair_at(row + h * g.width, g, i);
      Pairs<1, 1> dxhat = gradient_of(h, i);
      dxhat.each(pair_at(weights_of(b, h), g, i), [](float& mine, float weight) { mine *= weight; });
      sums.add(h < g.heads, 0, x.dot(x));
      sums.add(h < g.heads, 1, dxhat.dot(x));
    });
    sums.add_up(shared[t % 2]);
    each_pair(g, [&](int h, int i) {
      const bool is_q = h < g.heads;
      const float rstd = rstd_of(g, is_q, sums.of(is_q, 0));
      const float mean = rstd * sums.of(is_q, 1) / static_cast<float>((is_q ? g.heads : g.kv_heads) * g.width);
      Pairs<1, 1> xhat = pair_at(row + h * g.width, g, i), dy = gradient_of(h, i);
      xhat.each(xhat, [&](float& mine, float) { mine *= rstd; });
      Pairs<1, 1> dw = pair_at(partial + h * g.width, g, i);
      dw.add_products(dy, xhat);
      dw.store_to(partial + h * g.width, g, i);
      dy.each(pair_at(weights_of(b, h), g, i), [](float& mine, float weight) { mine *= weight; });
      dy.each(xhat, [&](float& mine, float x) { mine = rstd * (mine - x * mean); });
      dy.store_to(dx_row + h * g.width, g, i);
    });
    const int of_v = g.kv_heads * g.width;
    copy_elements(dx_row + (g.heads + g.kv_heads) * g.width, b.dy.v + t * of_v, of_v);
  }
}

// How many threads a row has, and how many vectors a thread; no threads: the fallback kernels take the row.
struct RowShape {
  int threads, vectors, num_lanes;
};
template <class T, class... P>
RowShape shape_of(const Heads& g, const P*... p) {
  constexpr int kNum = kPerVector<T>;
  if (g.width / 2 % kNum != 0 || g.heads < g.kv_heads || !rows_are_aligned(g.width, sizeof(T), p..., g.cos_sin))
    return {};
  const int lanes = g.width / 2 / kNum, total = (g.heads + g.kv_heads) * lanes, whole = std::lcm(32, lanes);
  for (const int vectors : {1, 2}) {
    const int threads = narrow<int>(div_ceil(div_ceil(total, vectors), whole) * whole);
    if (threads <= kMaxThreads) return {threads, vectors, lanes};
  }
  return {};
}

template <class T>
void note_fallback(const Stream& s, const char* op, const Heads& g) {
  if (dtype_of<T> != DType::bf16) return;
  note_fallback_kernel(
      s, op,
      fmt::format(
          "norms over all heads are fast for heads of a multiple of 16, with at most 16384 columns of q and k; got {} heads of {}",
          g.heads + g.kv_heads, g.width));
}

constexpr int kAnyThreads = 256;

}  // namespace

void rope_all_heads_fwd(Stream& s, const RopeFwd& a) {
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    Fwd<T> f{.out = {a.q_THd.ptr<T>(), a.k_TGd.ptr<T>(), a.v_TGd.ptr<T>()},
             .qkv = a.qkv_TC.ptr<T>(),
             .q_norm = a.q_norm_A.ptr<T>(),
             .k_norm = a.k_norm_B.ptr<T>(),
             .g = heads_of(a, a.q_THd, a.k_TGd)};
    const RowShape shape = shape_of<T>(f.g, f.out.q, f.out.k, f.out.v, f.qkv, f.q_norm, f.k_norm);
    const auto blocks = static_cast<unsigned>(narrow<int>(f.g.rows));
    if (shape.threads == 0) {
      note_fallback<T>(s, "rope_fwd", f.g);
      any_fwd_kernel<T><<<blocks, kAnyThreads, 0, cuda_stream(s)>>>(f);
      return;
    }
    f.g.num_lanes = shape.num_lanes;
    const LaunchShape how{.blocks = blocks, .threads = static_cast<unsigned>(shape.threads)};
    launch_kernel(s, f.g.rows <= kEarlyRows, how, shape.vectors == 1 ? fwd_kernel<T, 1> : fwd_kernel<T, 2>, f);
  });
  check_launch("rope_fwd");
}

void rope_all_heads_bwd(Stream& s, const RopeBwd& a) {
  const int64_t num_partials = a.partial_PW.dim(0), A = a.q_norm_A.numel(), B = a.k_norm_B.numel();
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    Bwd<T> b{.dqkv = a.dqkv_TC.ptr<T>(),
             .partial = a.partial_PW.ptr<float>(),
             .dy = {a.dq_THd.ptr<T>(), a.dk_TGd.ptr<T>(), a.dv_TGd.ptr<T>()},
             .qkv = a.qkv_TC.ptr<T>(),
             .q_norm = a.q_norm_A.ptr<T>(),
             .k_norm = a.k_norm_B.ptr<T>(),
             .g = heads_of(a, a.dq_THd, a.dk_TGd)};
    const RowShape shape = shape_of<T>(b.g, b.dqkv, b.partial, b.dy.q, b.dy.k, b.dy.v, b.qkv, b.q_norm, b.k_norm);
    const auto blocks = static_cast<unsigned>(narrow<int>(num_partials));
    if (shape.threads == 0) {
      note_fallback<T>(s, "rope_bwd", b.g);
      any_bwd_kernel<T><<<blocks, kAnyThreads, 0, cuda_stream(s)>>>(b);
      return;
    }
    b.g.num_lanes = shape.num_lanes;
    (shape.vectors == 1 ? bwd_kernel<T, 1> : bwd_kernel<T, 2>)<<<blocks, shape.threads, 0, cuda_stream(s)>>>(b);
  });
  check_launch("rope_bwd");
  const auto add_sums = [&](const Tensor& dnorm, int64_t first) {
    add_rows(cuda_stream(s), {.sum = dnorm.ptr<float>(),
                              .partial = a.partial_PW.ptr<float>() + first,
                              .num_partials = num_partials,
                              .width = dnorm.numel(),
                              .ld = A + B});
  };
  add_sums(a.dq_norm_A, 0);
  add_sums(a.dk_norm_B, A);
}

}  // namespace moebius::cuda
