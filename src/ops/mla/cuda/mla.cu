#include "ops/mla/mla.h"

#include <type_traits>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/vector.h"
#include "ops/mla/mla_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Heads {
  T* x;
  const int32_t* pos;
  const float* cos_sin;
  int64_t pairs;  // of all heads
  int num_positions, heads, width, half;
  bool interleaved;
  float sign;
};

// A thread is a pair of one head.
template <class T>
__global__ void __launch_bounds__(kThreads) rotate_kernel(Heads<T> a) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= a.pairs) return;
  const int64_t head = quotient(index, a.half);
  const int i = static_cast<int>(index - head * a.half), pos = a.pos[quotient(head, a.heads)];
  require(0 <= pos && pos < a.num_positions);
  const float* table = a.cos_sin + int64_t{pos} * 2 * a.half;
  const float cos = table[i], sin = a.sign * table[a.half + i];
  T* turned = a.x + (head + 1) * a.width - 2 * a.half + (a.interleaved ? 2 * i : i);
  T& first = turned[0];
  T& second = turned[a.interleaved ? 1 : a.half];
  const float u = element(first), v = element(second);
  set(first, u * cos - v * sin);
  set(second, v * cos + u * sin);
}

// Rows of a head: k is [n | r], v is v wide, kv is [n | v].
template <class T>
struct LatentKv {
  T *k, *v, *kv, *k_rope;
  int64_t rows;
  int heads, n, r, v_width;
};
template <class T>
LatentKv<T> latent_kv(const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& k_rope) {
  return {.k = k.ptr<T>(),
          .v = v.ptr<T>(),
          .kv = kv.ptr<T>(),
          .k_rope = k_rope.ptr<T>(),
          .rows = k.dim(0),
          .heads = narrow<int>(k.dim(1)),
          .n = narrow<int>(k.dim(2) - k_rope.dim(1)),
          .r = narrow<int>(k_rope.dim(1)),
          .v_width = narrow<int>(v.dim(2))};
}

template <int kNum, class T>
__device__ __forceinline__ void move(T* to, const T* from) {
  *reinterpret_cast<Raw<T, kNum>*>(to) = fetch<kNum>(from);
}

// A thread is a vector of one head's [k | v].
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) put_together_kernel(LatentKv<T> a) {
  const int d = a.n + a.r, vectors = (d + a.v_width) / kNum;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, head = quotient(index, vectors);
  if (head >= a.rows * a.heads) return;
  const int j = static_cast<int>(index - head * vectors) * kNum;
  const T* kv = a.kv + head * (a.n + a.v_width);
  if (j < a.n)
    move<kNum>(a.k + head * d + j, kv + j);
  else if (j < d)
    move<kNum>(a.k + head * d + j, a.k_rope + quotient(head, a.heads) * a.r + j - a.n);
  else
    move<kNum>(a.v + head * a.v_width + j - d, kv + a.n + j - d);
}

// A block is a row: its heads' vectors of [n | v], and columns of k_rope summed over the heads.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) take_apart_kernel(LatentKv<T> a) {
  const int64_t first = int64_t{blockIdx.x} * a.heads;
  const int d = a.n + a.r, width = a.n + a.v_width;
  for (int index = threadIdx.x; index < a.heads * (width / kNum); index += kThreads) {
    const int64_t head = first + index / (width / kNum);
    const int j = index % (width / kNum) * kNum;
    move<kNum>(a.kv + head * width + j, j < a.n ? a.k + head * d + j : a.v + head * a.v_width + j - a.n);
  }
  for (int i = threadIdx.x; i < a.r; i += kThreads) {
    float sum = 0;
#pragma unroll 8
    for (int h = 0; h < a.heads; ++h) sum += element(a.k[(first + h) * d + a.n + i]);
    set(a.k_rope[blockIdx.x * int64_t{a.r} + i], sum);
  }
}

// Calls launch with the widest vectors that the parts of a head allow.
template <class T, class F>
void with_vectors(const Stream& s, const char* op, const LatentKv<T>& a, F&& launch) {
  const bool whole = a.n % kPerVector<T> == 0 && a.r % kPerVector<T> == 0 &&
                     rows_are_aligned(a.v_width, sizeof(T), a.k, a.v, a.kv, a.k_rope);
  if (whole) return launch(std::integral_constant<int, kPerVector<T>>{});
  if constexpr (dtype_of<T> == DType::bf16)
    note_fallback_kernel(
        s, op,
        fmt::format("vectors are read of heads whose parts are multiples of 8; got {}, {} that rotate and "
                    "values of {}",
                    a.n, a.r, a.v_width));
  launch(std::integral_constant<int, 1>{});
}

}  // namespace

void rotate_heads(Stream& s, const RotateHeads& a) {
  with_float_type(a.x_THw.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int half = narrow<int>(a.cos_sin_Pr.dim(1) / 2), heads = narrow<int>(a.x_THw.dim(1));
    if (half == 0) return;
    const Heads<T> x{.x = a.x_THw.ptr<T>(),
                     .pos = a.pos_T.ptr<int32_t>(),
                     .cos_sin = a.cos_sin_Pr.ptr<float>(),
                     .pairs = a.x_THw.dim(0) * heads * half,
                     .num_positions = narrow<int>(a.cos_sin_Pr.dim(0)),
                     .heads = heads,
                     .width = narrow<int>(a.x_THw.dim(2)),
                     .half = half,
                     .interleaved = a.interleaved,
                     .sign = a.transposed ? -1.0f : 1.0f};
    rotate_kernel<<<num_blocks(x.pairs, kThreads), kThreads, 0, cuda_stream(s)>>>(x);
  });
  check_launch("rotate_heads");
}

void latent_kv_fwd(Stream& s, const LatentKvFwd& a) {
  with_float_type(a.k_THd.dtype, [&](auto zero) {
    const auto x = latent_kv<decltype(zero)>(a.k_THd, a.v_THv, a.kv_THw, a.k_rope_Tr);
    with_vectors(s, "latent_kv_fwd", x, [&](auto num) {
      const int64_t vectors = x.rows * x.heads * ((x.n + x.r + x.v_width) / num.value);
      put_together_kernel<num.value><<<num_blocks(vectors, kThreads), kThreads, 0, cuda_stream(s)>>>(x);
    });
  });
  check_launch("latent_kv_fwd");
}

void latent_kv_bwd(Stream& s, const LatentKvBwd& a) {
  with_float_type(a.dk_THd.dtype, [&](auto zero) {
    const auto x = latent_kv<decltype(zero)>(a.dk_THd, a.dv_THv, a.dkv_THw, a.dk_rope_Tr);
    with_vectors(s, "latent_kv_bwd", x, [&](auto num) {
      take_apart_kernel<num.value><<<narrow<int>(x.rows), kThreads, 0, cuda_stream(s)>>>(x);
    });
  });
  check_launch("latent_kv_bwd");
}

}  // namespace moebius::cuda
