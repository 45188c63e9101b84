// A block owns q or k of a row, with half of v. It reads them once, and keeps its heads in registers until their sum is
// known. In the backward pass it owns a chunk of rows, one after the other.
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

// Both passes read these. A block has one part of a row: the second dimension of the grid is 0 for q and 1 for k.
template <class T>
struct Rows {
  const T *qkv, *q_norm, *k_norm;
  Heads g;

  __device__ __forceinline__ bool is_q() const { return blockIdx.y == 0; }
  __device__ __forceinline__ int heads() const { return is_q() ? g.heads : g.kv_heads; }
  __device__ __forceinline__ const T* norm() const { return is_q() ? q_norm : k_norm; }
  __device__ __forceinline__ int columns() const { return g.per_row() * g.width; }
  __device__ __forceinline__ int columns_of_v() const { return g.kv_heads * g.width; }
  __device__ __forceinline__ int first() const { return is_q() ? 0 : g.heads * g.width; }
  __device__ __forceinline__ int first_of_v() const { return (g.heads + g.kv_heads) * g.width; }
  __device__ __forceinline__ float rstd(float squares) const {
    return rsqrtf(squares / static_cast<float>(heads() * g.width) + g.eps);
  }
  __device__ __forceinline__ const float* angles(int32_t pos) const {
    require(0 <= pos && pos < g.positions);
    return g.cos_sin + int64_t{pos} * g.width;
  }
};

template <class T>
struct Fwd {
  Rows<T> in;
  T *q, *k, *v;
  __device__ __forceinline__ T* part() const { return in.is_q() ? q : k; }
};

template <class T>
struct Bwd {
  Rows<T> in;
  const T *dq, *dk, *dv;
  T* dqkv;
  float* partial;
  __device__ __forceinline__ const T* part() const { return in.is_q() ? dq : dk; }
  __device__ __forceinline__ float* partial_of_block() const {
    return partial + blockIdx.x * int64_t{in.first_of_v()} + in.first();
  }
  __device__ __forceinline__ int64_t begin(int64_t chunk) const { return chunk * in.g.rows / gridDim.x; }
};

// Two sums over the block, in a fixed order. A later call needs other shared memory, or a barrier before it.
__device__ __forceinline__ float2 block_sums(float x, float y, float (&shared)[kMaxWarps][2]) {
  // One of two lanes goes on with x, and the other with y.
  const int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
  float sum = (lane < 16 ? x : y) + __shfl_xor_sync(0xffffffffu, lane < 16 ? y : x, 16);
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane % 16 == 0) shared[threadIdx.x / 32][lane / 16] = sum;
  __syncthreads();
  static_assert(kMaxWarps == 16);  // a lane has one sum of one warp
  sum = lane / 2 < warps ? shared[lane / 2][lane % 2] : 0.0f;
#pragma unroll
  for (int distance = 2; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return {__shfl_sync(0xffffffffu, sum, 0), __shfl_sync(0xffffffffu, sum, 1)};
}

// Loads 16 bytes, which are not read again if kOnce. It is volatile assembly, so that it stays where it is written.
template <bool kOnce>
__device__ __forceinline__ uint4 load_word(const void* p) {
  uint4 word;
  if constexpr (kOnce) {
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(p)
                 : "memory");
  } else {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(p)
                 : "memory");
  }
  return word;
}

// With C++, the compiler would store four words of 4 bytes.
__device__ __forceinline__ void store_word(void* p, const uint4& word) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// The vectors of a thread: those of one lane in heads first, first + step, ..., and vectors of v in turn.
// Threads without a head read the last one, and neither count nor store it.
template <class T, int kVectors>
struct Share {
  static constexpr int kNum = kPerVector<T>;
  using P = Pairs<kNum, 1>;
  template <class E>
  using InMemory = typename P::template InMemory<E>;

  __device__ __forceinline__ explicit Share(const Rows<T>& in)
      : lane_(static_cast<int>(threadIdx.x) % in.g.num_lanes), half_(in.g.width / 2), of_v_(in.columns_of_v()) {
    const int first = static_cast<int>(threadIdx.x) / in.g.num_lanes,
              step = static_cast<int>(blockDim.x) / in.g.num_lanes;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      exists[v] = first + v * step < in.heads();
      at[v] = min(first + v * step, in.heads() - 1) * in.g.width + lane_ * kNum;
    }
  }
  // Returns the pairs whose first numbers are at x.
  template <bool kOnce, class E>
  __device__ __forceinline__ InMemory<E> pairs(const E* x) const {
    InMemory<E> raw;
    constexpr int kWords = sizeof(raw.a[0]) / sizeof(uint4), kOfWord = sizeof(uint4) / sizeof(E);
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.a[0].words[i] = load_word<kOnce>(x + i * kOfWord);
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.b[0].words[i] = load_word<kOnce>(x + half_ + i * kOfWord);
    return raw;
  }
  __device__ __forceinline__ InMemory<float> angles(const float* row) const { return pairs<false>(row + lane_ * kNum); }
  __device__ __forceinline__ void store(T* y, const P& x) const {
    store_word(y, pack<T>(x.a[0]).words[0]);
    store_word(y + half_, pack<T>(x.b[0]).words[0]);
  }
  // Calls fn(v, first element in a row of v) for its vectors of v.
  template <class F>
  __device__ __forceinline__ void each_of_v(F&& fn) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int thread = (v * 2 + static_cast<int>(blockIdx.y)) * static_cast<int>(blockDim.x) + threadIdx.x;
      if (thread * kNum < of_v_) fn(v, thread * kNum);
    }
  }

  int at[kVectors];  // in the block's part of a row
  bool exists[kVectors];

 private:
  int lane_, half_, of_v_;
};

template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) fwd_kernel(Fwd<T> f) {
  using S = Share<T, kVectors>;
  using P = typename S::P;
  __shared__ float shared[32];
  const Rows<T>& in = f.in;
  const S own(in);
  const int64_t t = blockIdx.x;
  const T* row = in.qkv + t * in.columns();
  typename S::template InMemory<T> raw[kVectors], weights[kVectors];
  uint4 of_v[kVectors];
  let_next_start();
  wait_for_inputs();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) raw[v] = own.template pairs<true>(row + in.first() + own.at[v]);
  own.each_of_v([&](int v, int column) { of_v[v] = load_word<true>(row + in.first_of_v() + column); });
#pragma unroll
  for (int v = 0; v < kVectors; ++v) weights[v] = own.template pairs<false>(in.norm() + own.at[v]);
  const P angles = P::of(own.angles(in.angles(in.g.pos[t])));
  P x[kVectors];
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    x[v] = P::of(raw[v]);
    const float dot = x[v].dot(x[v]);
    squares += own.exists[v] ? dot : 0.0f;
  }
  own.each_of_v([&](int v, int column) { store_word(f.v + t * in.columns_of_v() + column, of_v[v]); });
  const float rstd = in.rstd(block_sum(squares, shared));
  T* y = f.part() + t * in.heads() * in.g.width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    x[v].each(P::of(weights[v]), [&](float& mine, float weight) { mine = weight * rounded<T>(mine * rstd); });
    x[v].turn(angles, 1.0f);
    if (own.exists[v]) own.store(y + own.at[v], x[v]);
  }
}

// The next row is loaded while one is processed.
//   g = dy turned back;  dw += g xhat;  dx = rstd (g w - xhat mean(g w xhat)).
template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) bwd_kernel(Bwd<T> b) {
  using S = Share<T, kVectors>;
  using P = typename S::P;
  __shared__ float shared[2][kMaxWarps][2];
  const Rows<T>& in = b.in;
  const S own(in);
  const int64_t begin = b.begin(blockIdx.x), end = b.begin(blockIdx.x + int64_t{1});
  const int heads_columns = in.heads() * in.g.width, of_v = in.columns_of_v(), columns = in.columns();
  const float part = 1.0f / static_cast<float>(heads_columns);
  typename S::template InMemory<T> next_dy[kVectors], next_x[kVectors];
  typename S::template InMemory<float> next_angles;
  uint4 next_v[kVectors];
  const T *dy_at = b.part() + begin * heads_columns, *x_at = in.qkv + begin * columns + in.first(),
          *v_at = b.dv + begin * of_v;
  T* dx_at = b.dqkv + begin * columns + in.first();
  int32_t next_pos = in.g.pos[begin];
  const auto load_row = [&](int64_t t) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      next_dy[v] = own.template pairs<true>(dy_at + own.at[v]);
      next_x[v] = own.template pairs<true>(x_at + own.at[v]);
    }
    own.each_of_v([&](int v, int column) { next_v[v] = load_word<true>(v_at + column); });
    next_angles = own.angles(in.angles(next_pos));
    dy_at += heads_columns, x_at += columns, v_at += of_v;
    if (t + 1 < end) next_pos = in.g.pos[t + 1];
  };
  load_row(begin);
  P dw[kVectors] = {};
  for (int64_t t = begin; t < end; ++t, dx_at += columns) {
    P dy[kVectors], dxhat[kVectors];
    typename S::template InMemory<T> raw_x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      raw_x[v] = next_x[v];
      dy[v] = P::of(next_dy[v]);
      dy[v].turn(P::of(next_angles), -1.0f);
    }
    own.each_of_v([&](int v, int column) { store_word(dx_at + (in.first_of_v() - in.first()) + column, next_v[v]); });
    if (t + 1 < end) load_row(t + 1);
    float squares = 0, products = 0;  // the products of x with the gradient of xhat
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const P x = P::of(raw_x[v]);
      dxhat[v] = dy[v];
      dxhat[v].each(P::of(own.template pairs<false>(in.norm() + own.at[v])),
                    [](float& mine, float weight) { mine *= weight; });
      const float square = x.dot(x), product = dxhat[v].dot(x);
      squares += own.exists[v] ? square : 0.0f;
      products += own.exists[v] ? product : 0.0f;
    }
    const float2 sums = block_sums(squares, products, shared[t % 2]);
    const float rstd = rsqrtf(sums.x * part + in.g.eps), mean = rstd * sums.y * part;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      P xhat = P::of(raw_x[v]);
      xhat.each(xhat, [&](float& mine, float) { mine *= rstd; });
      dw[v].add_products(dy[v], xhat);
      xhat.each(dxhat[v], [&](float& x, float dx) { x = rstd * dx - rstd * mean * x; });
      if (own.exists[v]) own.store(dx_at + own.at[v], xhat);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!own.exists[v]) continue;
    store(b.partial_of_block() + own.at[v], dw[v].a[0]);
    store(b.partial_of_block() + own.at[v] + in.g.width / 2, dw[v].b[0]);
  }
}

// The fallback kernels take any shape, an element at a time, and read each row twice.

// Calls fn(first column of the head in the block's part of a row, offset in the head) for the thread's pairs.
template <class T, class F>
__device__ __forceinline__ void each_pair(const Rows<T>& in, F&& fn) {
  const int half = in.g.width / 2;
  for (int p = static_cast<int>(threadIdx.x); p < in.heads() * half; p += static_cast<int>(blockDim.x))
    fn(p / half * in.g.width, p % half);
}

// Copies a row of v where the block has q.
template <class T>
__device__ __forceinline__ void copy_v(const Rows<T>& in, T* to, const T* from) {
  if (!in.is_q()) return;
  for (int i = static_cast<int>(threadIdx.x); i < in.columns_of_v(); i += static_cast<int>(blockDim.x)) to[i] = from[i];
}

using Pair = Pairs<1, 1>;

template <class T>
__device__ __forceinline__ Pair pair_at(const T* head, const Heads& g, int i) {
  return Pair::of(Pair::fetch_from(head, g, i));
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1) any_fwd_kernel(Fwd<T> f) {
  __shared__ float shared[32];
  const Rows<T>& in = f.in;
  const Heads& g = in.g;
  const int64_t t = blockIdx.x;
  const T *row = in.qkv + t * in.columns(), *x_row = row + in.first();
  T* y = f.part() + t * in.heads() * g.width;
  float squares = 0;
  each_pair(in, [&](int h, int i) {
    const Pair x = pair_at(x_row + h, g, i);
    squares += x.dot(x);
  });
  const float rstd = in.rstd(block_sum(squares, shared));
  const float* angles = in.angles(g.pos[t]);
  each_pair(in, [&](int h, int i) {
    Pair x = pair_at(x_row + h, g, i);
    x.each(pair_at(in.norm() + h, g, i), [&](float& mine, float weight) { mine = weight * rounded<T>(mine * rstd); });
    x.turn(pair_at(angles, g, i), 1.0f);
    x.store_to(y + h, g, i);
  });
  copy_v(in, f.v + t * in.columns_of_v(), row + in.first_of_v());
}

// The block's sums of the norm's gradient are in its row of partial, where each column is one thread's.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1) any_bwd_kernel(Bwd<T> b) {
  __shared__ float shared[2][kMaxWarps][2];
  const Rows<T>& in = b.in;
  const Heads& g = in.g;
  each_pair(in, [&](int h, int i) { Pair{}.store_to(b.partial_of_block() + h, g, i); });
  for (int64_t t = b.begin(blockIdx.x); t < b.begin(blockIdx.x + int64_t{1}); ++t) {
    const T *x_row = in.qkv + t * in.columns() + in.first(), *dy_row = b.part() + t * in.heads() * g.width;
    T* dx_row = b.dqkv + t * in.columns();
    const float* angles = in.angles(g.pos[t]);
    const auto gradient_of = [&](int h, int i) {
      Pair dy = pair_at(dy_row + h, g, i);
      dy.turn(pair_at(angles, g, i), -1.0f);
      return dy;
    };
    float squares = 0, products = 0;
    each_pair(in, [&](int h, int i) {
      const Pair x = pair_at(x_row + h, g, i);
      Pair dxhat = gradient_of(h, i);
      dxhat.each(pair_at(in.norm() + h, g, i), [](float& mine, float weight) { mine *= weight; });
      squares += x.dot(x);
      products += dxhat.dot(x);
    });
    const float2 sums = block_sums(squares, products, shared[t % 2]);
    const float rstd = in.rstd(sums.x), mean = rstd * sums.y / static_cast<float>(in.heads() * g.width);
    each_pair(in, [&](int h, int i) {
      Pair xhat = pair_at(x_row + h, g, i), dy = gradient_of(h, i);
      xhat.each(xhat, [&](float& mine, float) { mine *= rstd; });
      Pair dw = pair_at(b.partial_of_block() + h, g, i);
      dw.add_products(dy, xhat);
      dw.store_to(b.partial_of_block() + h, g, i);
      dy.each(pair_at(in.norm() + h, g, i), [](float& mine, float weight) { mine *= weight; });
      xhat.each(dy, [&](float& x, float dx) { x = rstd * dx - rstd * mean * x; });
      xhat.store_to(dx_row + in.first() + h, g, i);
    });
    copy_v(in, dx_row + in.first_of_v(), b.dv + t * in.columns_of_v());
  }
}

// How many threads a block has, and how many vectors a thread; no threads: the fallback kernels take the rows.
struct BlockShape {
  int threads, vectors, num_lanes;
};
template <class T, class... P>
BlockShape shape_of(const Heads& g, const P*... p) {
  constexpr int kNum = kPerVector<T>;
  if (g.width / 2 % kNum != 0 || !rows_are_aligned(g.width, sizeof(T), p..., g.cos_sin)) return {};
  const int lanes = g.width / 2 / kNum, total = std::max(g.heads, g.kv_heads) * lanes, whole = std::lcm(32, lanes);
  for (const int vectors : {1, 2}) {
    const int threads = narrow<int>(div_ceil(div_ceil(total, vectors), whole) * whole);
    if (threads <= kMaxThreads) return {threads, vectors, lanes};
  }
  return {};
}

constexpr int kFallbackThreads = 256;

template <class T>
void note_fallback(const Stream& s, const char* op, const Heads& g) {
  if (dtype_of<T> != DType::bf16) return;
  note_fallback_kernel(s, op,
                       fmt::format("norms over all heads read vectors of heads of a multiple of 16, at most 16384 "
                                   "elements together; got {} heads of {}",
                                   g.heads, g.width));
}

template <class T, class Op>
Rows<T> rows_of(const Op& a, const Tensor& q_THd, const Tensor& k_TGd) {
  return {.qkv = a.qkv_TC.template ptr<T>(),
          .q_norm = a.q_norm_A.template ptr<T>(),
          .k_norm = a.k_norm_B.template ptr<T>(),
          .g = heads_of(a, q_THd, k_TGd)};
}

}  // namespace

void rope_all_heads_fwd(Stream& s, const RopeFwd& a) {
  const dim3 blocks(static_cast<unsigned>(narrow<int>(a.qkv_TC.dim(0))), 2);
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    Fwd<T> f{
        .in = rows_of<T>(a, a.q_THd, a.k_TGd), .q = a.q_THd.ptr<T>(), .k = a.k_TGd.ptr<T>(), .v = a.v_TGd.ptr<T>()};
    const BlockShape shape = shape_of<T>(f.in.g, f.q, f.k, f.v, f.in.qkv, f.in.q_norm, f.in.k_norm);
    if (shape.threads == 0) {
      note_fallback<T>(s, "rope_fwd", f.in.g);
      any_fwd_kernel<T><<<blocks, kFallbackThreads, 0, cuda_stream(s)>>>(f);
      return;
    }
    f.in.g.num_lanes = shape.num_lanes;
    const LaunchShape how{.blocks = blocks, .threads = static_cast<unsigned>(shape.threads)};
    launch_kernel(s, f.in.g.rows <= kEarlyRows, how, shape.vectors == 1 ? fwd_kernel<T, 1> : fwd_kernel<T, 2>, f);
  });
  check_launch("rope_fwd");
}

void rope_all_heads_bwd(Stream& s, const RopeBwd& a) {
  const int64_t num_partials = a.partial_PW.dim(0), A = a.q_norm_A.numel(), B = a.k_norm_B.numel();
  const dim3 blocks(static_cast<unsigned>(narrow<int>(num_partials)), 2);
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    Bwd<T> b{.in = rows_of<T>(a, a.dq_THd, a.dk_TGd),
             .dq = a.dq_THd.ptr<T>(),
             .dk = a.dk_TGd.ptr<T>(),
             .dv = a.dv_TGd.ptr<T>(),
             .dqkv = a.dqkv_TC.ptr<T>(),
             .partial = a.partial_PW.ptr<float>()};
    const BlockShape shape =
        shape_of<T>(b.in.g, b.dq, b.dk, b.dv, b.dqkv, b.partial, b.in.qkv, b.in.q_norm, b.in.k_norm);
    if (shape.threads == 0) {
      note_fallback<T>(s, "rope_bwd", b.in.g);
      any_bwd_kernel<T><<<blocks, kFallbackThreads, 0, cuda_stream(s)>>>(b);
      return;
    }
    b.in.g.num_lanes = shape.num_lanes;
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
