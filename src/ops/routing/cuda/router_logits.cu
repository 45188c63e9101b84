// The gate's matrix products in f32 multiply-adds, for any shape and dtype. Each of the three is
//   out[m, n] = sum over k of a(m, k) b(n, k)
// with its own strides. The tensor cores compute those of a bf16 x (sm90/router_logits.cu, sm80/router_logits.cu).
#include <cuda_bf16.h>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/elementwise_backends.h"
#include "ops/routing/cuda/router_logits.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4;  // a thread has kEach x kEach sums
constexpr int kLoads = kTile * kDepth / kThreads;

__device__ float load_f32(const float* x) { return *x; }
__device__ float load_f32(const bf16* x) { return __uint_as_float(static_cast<uint32_t>(x->bits) << 16); }

// x(row, k) = data[row * row_stride + k * k_stride], one of the strides 1.
template <class T>
struct Operand {
  const T* data;
  int64_t row_stride, k_stride, num_rows;
};

struct Extent {
  int64_t num_k, k_per_part;  // a part of k for each block in z
  int64_t ld;                 // of out
};

// Rows [first, first + kTile) and k in [k, k + kDepth) below k_end, as tile[k][row]; 0 outside.
template <class T>
__device__ void load_tile(float (&tile)[kDepth][kTile + 4], const Operand<T>& x, int64_t first, int64_t k,
                          int64_t k_end) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int i = j * kThreads + threadIdx.x;
    const int row = x.k_stride == 1 ? i / kDepth : i % kTile, depth = x.k_stride == 1 ? i % kDepth : i / kTile;
    const bool inside = first + row < x.num_rows && k + depth < k_end;
    tile[depth][row] = inside ? load_f32(x.data + (first + row) * x.row_stride + (k + depth) * x.k_stride) : 0.0f;
  }
}

struct Store {
  float* out;
  __device__ void operator()(int64_t i, float sum) const { out[i] = sum; }
};

struct StoreLogits {
  float* out;
  const float* bias;  // null: none
  int64_t num_experts;
  __device__ void operator()(int64_t i, float sum) const { out[i] = bias ? sum + bias[i % num_experts] : sum; }
};

template <class T>
struct AddTo;
template <>
struct AddTo<float> {
  float* out;
  __device__ void operator()(int64_t i, float sum) const { out[i] += sum; }
};
template <>
struct AddTo<bf16> {
  bf16* out;
  __device__ void operator()(int64_t i, float sum) const {
    reinterpret_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(load_f32(out + i) + sum);
  }
};

// A block owns a tile of out in one part of k; a thread kEach x kEach of it. Sums run in the
// order of k.
template <class A, class B, class Write>
__global__ void __launch_bounds__(kThreads) product_kernel(Operand<A> a, Operand<B> b, Extent extent, Write write) {
  __shared__ float a_tile[kDepth][kTile + 4], b_tile[kDepth][kTile + 4];
  const int64_t m = blockIdx.x * int64_t{kTile}, n = blockIdx.y * int64_t{kTile};
  const int64_t k_begin = blockIdx.z * extent.k_per_part, k_end = min(extent.num_k, k_begin + extent.k_per_part);
  const int row = threadIdx.x / (kTile / kEach) * kEach, column = threadIdx.x % (kTile / kEach) * kEach;
  float sum[kEach][kEach] = {};
  for (int64_t k = k_begin; k < k_end; k += kDepth) {
    load_tile(a_tile, a, m, k, k_end);
    load_tile(b_tile, b, n, k, k_end);
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      const float4 x = *reinterpret_cast<const float4*>(&a_tile[depth][row]);
      const float4 y = *reinterpret_cast<const float4*>(&b_tile[depth][column]);
      const float xs[kEach] = {x.x, x.y, x.z, x.w}, ys[kEach] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] = __fmaf_rn(xs[i], ys[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (m + row + i >= a.num_rows || n + column + j >= b.num_rows) continue;
      write((blockIdx.z * a.num_rows + m + row + i) * extent.ld + n + column + j, sum[i][j]);
    }
  }
}

template <class A, class B, class Write>
void product(Stream& s, const Operand<A>& a, const Operand<B>& b, const Extent& extent, int64_t parts,
             const Write& write) {
  const dim3 blocks(static_cast<unsigned>(div_ceil(a.num_rows, kTile)),
                    static_cast<unsigned>(div_ceil(b.num_rows, kTile)), static_cast<unsigned>(parts));
  product_kernel<<<blocks, kThreads, 0, cuda_stream(s)>>>(a, b, extent, write);
  check_launch("router_logits");
}

// A thread owns elements of dw and adds the partials in order.
__global__ void __launch_bounds__(kThreads) add_partials_kernel(float* dw, const float* partial, int64_t n, int parts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
#pragma unroll 4
  for (int p = 0; p < parts; ++p) sum += partial[p * n + i];
  dw[i] += sum;
}

// Calls fn(X{}, W{}) for the dtypes of x and w.
template <class F>
void with_types(const Tensor& x, const Tensor& w, F&& fn) {
  if (x.dtype == DType::f32) return fn(float{}, float{});
  if (w.dtype == DType::f32) return fn(bf16{}, float{});
  fn(bf16{}, bf16{});
}

// Returns whether Hopper's kernels compute the products, which gate_on_tensor_cores() allows. They read w in f32 through
// the scratch.
bool takes_hopper(const Stream& s, const char* op, const Tensor& x_TD, const Tensor& w_ED) {
  if (!uses_hopper_kernels(s)) return false;
  const bool takes = gate_rows_are_aligned(x_TD) && (w_ED.dtype == DType::f32 || is_aligned(w_ED));
  if (!takes) {
    note_fallback_kernel(s, op,
                         fmt::format("portable kernels, since the Hopper kernels take rows of a multiple of 8, at "
                                     "multiples of 16 bytes; got rows of {}",
                                     x_TD.dim(1)));
  }
  return takes;
}

template <class X>
void fill_partials(Stream& s, const RouterLogitsBwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0), parts = a.partial_PED.dim(0);
  product(s, Operand<float>{a.dlogits_TE.ptr<float>(), 1, E, E}, Operand<X>{a.x_TD.ptr<X>(), 1, D, D},
          Extent{T, div_ceil(T, parts), D}, parts, Store{a.partial_PED.ptr<float>()});
}

}  // namespace

void router_logits_fwd(Stream& s, const RouterLogitsFwd& a) {
  if (gate_on_tensor_cores(a.x_TD)) {
    return takes_hopper(s, "router_logits_fwd", a.x_TD, a.w_ED) ? router_logits_on_tensor_cores(s, a)
                                                                : sm80::router_logits_on_tensor_cores(s, a);
  }
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  with_types(a.x_TD, a.w_ED, [&]<class X, class W>(X, W) {
    product(s, Operand<X>{a.x_TD.ptr<X>(), D, 1, T}, Operand<W>{a.w_ED.ptr<W>(), D, 1, E}, Extent{D, D, E}, 1,
            StoreLogits{a.logits_TE.ptr<float>(), bias_of(a), E});
  });
}

void router_logits_bwd(Stream& s, const RouterLogitsBwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0), n = a.dw_ED.numel();
  if (gate_on_tensor_cores(a.x_TD)) {
    takes_hopper(s, "router_logits_bwd", a.x_TD, a.w_ED) ? router_grads_on_tensor_cores(s, a)
                                                         : sm80::router_grads_on_tensor_cores(s, a);
  } else {
    with_types(a.x_TD, a.w_ED, [&]<class X, class W>(X, W) {
      if (!a.dx_TD.empty()) {
        product(s, Operand<float>{a.dlogits_TE.ptr<float>(), E, 1, T}, Operand<W>{a.w_ED.ptr<W>(), 1, D, D},
                Extent{E, E, D}, 1, AddTo<X>{a.dx_TD.ptr<X>()});
      }
      if (!a.dw_ED.empty()) fill_partials<X>(s, a);
    });
  }
  if (n > 0)
    add_partials_kernel<<<static_cast<unsigned>(div_ceil(n, kThreads)), kThreads, 0, cuda_stream(s)>>>(
        a.dw_ED.ptr<float>(), a.partial_PED.ptr<float>(), n, static_cast<int>(a.partial_PED.dim(0)));
  check_launch("router_logits_bwd");
  if (a.dbias_E.empty()) return;
  const GateScratch scratch(a.scratch.data, a.x_TD, a.w_ED, true);
  cuda::sum_rows(
      s, {.sum_C = a.dbias_E, .x_TC = a.dlogits_TE, .scratch = a.scratch.rows(scratch.num_bytes, a.scratch.dim(0))});
}

}  // namespace moebius::cuda
