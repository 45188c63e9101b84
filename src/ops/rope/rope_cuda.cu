#include <algorithm>
#include <cmath>

#include "core/cuda.h"
#include "ops/backends.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/vector.h"
#include "ops/rope/rope.h"

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

// A head is the work of a group of num_lanes lanes (a power of two). A lane has kVectors times kNum pairs (i, i + d/2).
struct Heads {
  int64_t rows, positions;
  int heads, kv_heads, width, num_lanes;
  float eps;
  const int32_t* pos;
  const float* cos_sin;

  __host__ __device__ int per_row() const { return heads + 2 * kv_heads; }
};

// The arrays of one kind of head, [rows, heads of a row, width].
template <class T>
struct Parts {
  T *q, *k, *v;
  __device__ T* head(const Heads& g, int64_t t, int h) const {
    if (h < g.heads) return q + (t * g.heads + h) * g.width;
    if (h < g.heads + g.kv_heads) return k + (t * g.kv_heads + h - g.heads) * g.width;
    return v + (t * g.kv_heads + h - g.heads - g.kv_heads) * g.width;
  }
};

// The pairs of one lane.
template <int kNum, int kVectors>
struct Pairs {
  float a[kVectors][kNum], b[kVectors][kNum];

  // As they are in memory.
  template <class T>
  struct InMemory {
    Raw<T, kNum> a[kVectors], b[kVectors];
  };
  template <class T>
  static __device__ __forceinline__ InMemory<T> fetch_from(const T* x, const Heads& g, int lane, bool valid = true) {
    InMemory<T> raw;
    const int half = g.width / 2;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = (v * g.num_lanes + lane) * kNum;
      raw.a[v] = fetch<kNum>(x + i, valid && i < half);
      raw.b[v] = fetch<kNum>(x + half + i, valid && i < half);
    }
    return raw;
  }
  template <class T>
  static __device__ __forceinline__ Pairs of(const InMemory<T>& raw) {
    Pairs p;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unpack<T>(p.a[v], raw.a[v]);
      unpack<T>(p.b[v], raw.b[v]);
    }
    return p;
  }
  template <class T>
  __device__ __forceinline__ void store_to(T* y, const Heads& g, int lane) const {
    const int half = g.width / 2;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = (v * g.num_lanes + lane) * kNum;
      if (i >= half) continue;
      store(y + i, a[v]);
      store(y + half + i, b[v]);
    }
  }
  // By the angles of cos and sin, or back.
  __device__ __forceinline__ void turn(const Pairs& cos_sin, float sign) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) {
        const float x = a[v][j], y = b[v][j], cos = cos_sin.a[v][j], sin = sign * cos_sin.b[v][j];
        a[v][j] = x * cos - y * sin;
        b[v][j] = y * cos + x * sin;
      }
    }
  }
  __device__ __forceinline__ float dot(const Pairs& other) const {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) sum += a[v][j] * other.a[v][j] + b[v][j] * other.b[v][j];
    }
    return sum;
  }
  // fn(mine, other's) for each number.
  template <class F>
  __device__ __forceinline__ void each(const Pairs& other, F&& fn) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) {
        fn(a[v][j], other.a[v][j]);
        fn(b[v][j], other.b[v][j]);
      }
    }
  }
};

template <int kNum, int kVectors>
__device__ __forceinline__ Pairs<kNum, kVectors> angles_of(const Heads& g, int64_t t, int lane) {
  const int32_t pos = g.pos[t];
  require(0 <= pos && pos < g.positions);
  using P = Pairs<kNum, kVectors>;
  return P::of(P::fetch_from(g.cos_sin + int64_t{pos} * g.width, g, lane));
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
  // Lanes without work stay for the sums over their warp.
  const int first =
      group < g.rows * groups_of_row ? static_cast<int>(group - t * groups_of_row) * kHeadsAtOnce : per_row;
  using P = Pairs<kNum, kVectors>;
  typename P::template InMemory<T> raw[kHeadsAtOnce];
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
      const float rstd = 1.0f / sqrtf(group_sum(x.dot(x), g.num_lanes) / static_cast<float>(g.width) + g.eps);
      const T* norm = h < g.heads ? f.q_norm : h < g.heads + g.kv_heads ? f.k_norm : nullptr;
      if (norm) {
        const P w = P::of(P::fetch_from(norm, g, lane));
        x.each(w, [&](float& mine, float weight) { mine = weight * rounded<T>(mine * rstd); });
      }
    }
    if (h >= per_row) continue;
    if (h < g.heads + g.kv_heads) x.turn(cos_sin, 1.0f);
    x.store_to(f.out.head(g, t, h), g, lane);
  }
}

template <class T>
struct Bwd {
  T* dqkv;
  float* partial;
  Parts<const T> in;
  const T *qkv, *q_norm, *k_norm;
  Heads g;
};

// Adds what the groups of the block have for each column, in order: columns [0, d) of dq_norm, then those of dk_norm.
template <int kNum, int kVectors>
__device__ __forceinline__ void store_norm_sums(float* partial, const Pairs<kNum, kVectors> (&dw)[2], const Heads& g) {
  constexpr int kPairs = kNum * kVectors;
  __shared__ float sums[kPairs][kThreads];
  const int half = g.width / 2;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      sums[i][threadIdx.x] = part % 2 ? dw[part / 2].b[i / kNum][i % kNum] : dw[part / 2].a[i / kNum][i % kNum];
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

// A block owns a chunk of rows, its groups take their heads in turn and keep their part of dq_norm and dk_norm in
// registers.   g = dy turned back;  dw += g xhat;  dx = rstd (g w - xhat mean(g w xhat)).
template <class T, int kNum, int kVectors, bool kNorm>
__global__ void __launch_bounds__(kThreads, kVectors == 1 ? 2 : 1) rope_bwd_kernel(Bwd<T> b) {
  using P = Pairs<kNum, kVectors>;
  const Heads& g = b.g;
  const int per_row = g.per_row(), lane = threadIdx.x % g.num_lanes, groups = kThreads / g.num_lanes;
  const int64_t begin = blockIdx.x * g.rows / gridDim.x, end = (blockIdx.x + int64_t{1}) * g.rows / gridDim.x;
  const int num_heads = static_cast<int>(end - begin) * per_row;
  // What the group's head `item` of the chunk needs from memory; the next one's is on its way while one is worked on.
  typename P::template InMemory<T> next_dy, next_x;
  const auto fetch_head = [&](int item) {
    const int row = static_cast<int>(static_cast<uint32_t>(item) / static_cast<uint32_t>(per_row));
    const int h = item - row * per_row;
    const bool valid = item < num_heads;
    next_dy = P::fetch_from(b.in.head(g, begin + row, h), g, lane, valid);
    if constexpr (kNorm) {
      const bool has_norm = h < g.heads ? b.q_norm != nullptr : h < g.heads + g.kv_heads && b.k_norm != nullptr;
      next_x = P::fetch_from(b.qkv + ((begin + row) * per_row + h) * g.width, g, lane, valid && has_norm);
    }
  };
  P dw[2] = {};
  int item = threadIdx.x / g.num_lanes;
  fetch_head(item);
  // Whole rounds, so that all lanes of a warp take part in its sums.
  for (int round = 0; round < num_heads; round += groups, item += groups) {
    const bool has_work = item < num_heads;
    const int row = has_work ? static_cast<int>(static_cast<uint32_t>(item) / static_cast<uint32_t>(per_row)) : 0;
    const int h = has_work ? item - row * per_row : per_row - 1;
    const int64_t t = begin + row;
    P dy = P::of(next_dy);
    const typename P::template InMemory<T> raw_x = next_x;
    fetch_head(item + groups);
    if (h < g.heads + g.kv_heads) dy.turn(angles_of<kNum, kVectors>(g, t, lane), -1.0f);
    if constexpr (kNorm) {
      const T* norm = h < g.heads ? b.q_norm : h < g.heads + g.kv_heads ? b.k_norm : nullptr;
      const P x = P::of(raw_x), w = P::of(P::fetch_from(norm, g, lane, norm != nullptr));
      const float rstd = 1.0f / sqrtf(group_sum(x.dot(x), g.num_lanes) / static_cast<float>(g.width) + g.eps);
      P product = dy;
      product.each(x, [&](float& mine, float of_x) { mine *= of_x * rstd; });
      const float mean = group_sum(product.dot(w), g.num_lanes) / static_cast<float>(g.width);
      if (norm && has_work) {
        // Constant indices: the sums stay in registers.
        if (h < g.heads)
          dw[0].each(product, [](float& mine, float term) { mine += term; });
        else
          dw[1].each(product, [](float& mine, float term) { mine += term; });
        dy.each(w, [](float& mine, float weight) { mine *= weight; });
        dy.each(x, [&](float& mine, float of_x) { mine = rstd * (mine - of_x * rstd * mean); });
      }
    }
    if (has_work) dy.store_to(b.dqkv + (t * per_row + h) * g.width, g, lane);
  }
  if constexpr (kNorm) store_norm_sums(b.partial + blockIdx.x * 2 * g.width, dw, g);
}

template <class A>
Heads heads_of(const A& a, const Tensor& q_THd, const Tensor& k_TGd) {
  return {.rows = q_THd.dim(0),
          .positions = a.cos_sin_Pd.dim(0),
          .heads = narrow<int>(q_THd.dim(1)),
          .kv_heads = narrow<int>(k_TGd.dim(1)),
          .width = narrow<int>(q_THd.dim(2)),
          .num_lanes = 1,
          .eps = a.eps,
          .pos = a.pos_T.template ptr<int32_t>(),
          .cos_sin = a.cos_sin_Pd.template ptr<float>()};
}

constexpr int kScalarVectors = 8;

// How many lanes a head has with kNum x kVectors pairs a lane.
int lanes_for(const char* who, const Heads& g, int pairs) {
  int lanes = 1;
  while (lanes * pairs < g.width / 2) lanes *= 2;
  MOEBIUS_CHECK(usage, lanes <= 32, "{}: on a GPU heads are at most {} wide; got {}", who, 2 * 32 * pairs, g.width);
  return lanes;
}

// Vectors where half a head is whole vectors on a warp or less.
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
  const int blocks = num_blocks(groups, kThreads / f.g.num_lanes);
  if (f.q_norm || f.k_norm)
    rope_fwd_kernel<T, kNum, kVectors, true><<<blocks, kThreads, 0, cuda_stream(s)>>>(f);
  else
    rope_fwd_kernel<T, kNum, kVectors, false><<<blocks, kThreads, 0, cuda_stream(s)>>>(f);
}

template <class T, int kNum, int kVectors>
void launch_bwd(Stream& s, Bwd<T> b, int64_t num_partials) {
  b.g.num_lanes = lanes_for("rope_bwd", b.g, kNum * kVectors);
  const int blocks = narrow<int>(num_partials);
  if (b.q_norm || b.k_norm)
    rope_bwd_kernel<T, kNum, kVectors, true><<<blocks, kThreads, 0, cuda_stream(s)>>>(b);
  else
    rope_bwd_kernel<T, kNum, kVectors, false><<<blocks, kThreads, 0, cuda_stream(s)>>>(b);
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
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Fwd<T> f{.out = {a.q_THd.ptr<T>(), a.k_TGd.ptr<T>(), a.v_TGd.ptr<T>()},
                   .qkv = a.qkv_TC.ptr<T>(),
                   .q_norm = pointer_or_null<T>(a.q_norm_d),
                   .k_norm = pointer_or_null<T>(a.k_norm_d),
                   .g = heads_of(a, a.q_THd, a.k_TGd)};
    if (takes_vectors<T>(f.g, f.out.q, f.out.k, f.out.v, f.qkv, f.q_norm, f.k_norm))
      launch_fwd<T, kPerVector<T>, 1>(s, f);
    else
      launch_fwd<T, 1, kScalarVectors>(s, f);
  });
  check_launch("rope_fwd");
}

void rope_bwd(Stream& s, const RopeBwd& a) {
  const int64_t rows = a.qkv_TC.dim(0), width = a.dq_THd.dim(2), num_partials = RopeBwd::num_partials(rows, s);
  const bool norm = !a.q_norm_d.empty() || !a.k_norm_d.empty();
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Bwd<T> b{.dqkv = a.dqkv_TC.ptr<T>(),
                   .partial = norm ? a.partial_P2d.ptr<float>() : nullptr,
                   .in = {a.dq_THd.ptr<T>(), a.dk_TGd.ptr<T>(), a.dv_TGd.ptr<T>()},
                   .qkv = a.qkv_TC.ptr<T>(),
                   .q_norm = pointer_or_null<T>(a.q_norm_d),
                   .k_norm = pointer_or_null<T>(a.k_norm_d),
                   .g = heads_of(a, a.dq_THd, a.dk_TGd)};
    if (takes_vectors<T>(b.g, b.dqkv, b.in.q, b.in.k, b.in.v, b.qkv, b.q_norm, b.k_norm))
      launch_bwd<T, kPerVector<T>, 1>(s, b, num_partials);
    else
      launch_bwd<T, 1, kScalarVectors>(s, b, num_partials);
  });
  check_launch("rope_bwd");
  const auto add_sums = [&](const Tensor& norm, const Tensor& dnorm, int64_t first) {
    if (norm.empty()) return;
    add_rows(cuda_stream(s), {.sum = dnorm.ptr<float>(),
                              .partial = a.partial_P2d.ptr<float>() + first,
                              .num_partials = num_partials,
                              .width = width,
                              .ld = 2 * width});
  };
  add_sums(a.q_norm_d, a.dq_norm_d, 0);
  add_sums(a.k_norm_d, a.dk_norm_d, width);
}

}  // namespace moebius::cuda
