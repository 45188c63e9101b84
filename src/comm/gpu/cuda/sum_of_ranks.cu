#include <cuda_bf16.h>

#include <algorithm>

#include "comm/gpu/cuda/sum_of_ranks.h"
#include "device/cuda/cuda.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kMaxBlocks = 264;  // two blocks for each multiprocessor of an H200

// The rules for adding, as in comm/rank_order_sum.cc: the types of the parts, of the running sum, and of the result.
template <class ElementT, class SumT, class OutT = ElementT>
struct Rule {
  using Element = ElementT;
  using Sum = SumT;
  using Out = OutT;
};

template <class Sum, class Element>
__device__ Sum load(Element x) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>)
    return __bfloat162float(x);
  else
    return static_cast<Sum>(x);
}

template <class Out, class Sum>
__device__ Out store(Sum x) {
  if constexpr (std::is_same_v<Out, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return static_cast<Out>(x);
}

// A group of kWidth elements that are loaded or stored at once.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T at[kWidth];
};

// A thread owns every (blocks x threads)-th pack of out, which it reads once from each part and
// writes once.
template <class R, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_kernel(typename R::Out* out, RankParts parts, int64_t num_packs) {
  using P = Pack<typename R::Element, kWidth>;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_packs; i += step) {
    typename R::Sum sum[kWidth];
    for (int r = 0; r < parts.count; ++r) {
      const void* part =
          r == parts.own_rank ? parts.own : static_cast<const char*>(parts.arrived) + r * parts.stride_bytes;
      const P pack = static_cast<const P*>(part)[i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const auto x = load<typename R::Sum>(pack.at[k]);
        sum[k] = r == 0 ? x : sum[k] + x;
      }
    }
    Pack<typename R::Out, kWidth> y;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y.at[k] = store<typename R::Out>(sum[k]);
    reinterpret_cast<Pack<typename R::Out, kWidth>*>(out)[i] = y;
  }
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class R, int kWidth>
void launch(cudaStream_t stream, const Tensor& out, const RankParts& parts) {
  const int64_t num_packs = out.numel() / kWidth;
  const int blocks = static_cast<int>(std::min<int64_t>((num_packs + kThreads - 1) / kThreads, kMaxBlocks));
  sum_kernel<R, kWidth><<<blocks, kThreads, 0, stream>>>(static_cast<typename R::Out*>(out.data), parts, num_packs);
  check_launch("sum_of_ranks");
}

template <class R>
void sum(cudaStream_t stream, const Tensor& out, const RankParts& parts) {
  // A pack has at most 16 bytes, of the parts and of the result.
  constexpr int kWidth = 16 / std::max(sizeof(typename R::Element), sizeof(typename R::Out));
  const bool wide = is_aligned(out.data) && is_aligned(parts.own) && is_aligned(parts.arrived) &&
                    parts.stride_bytes % 16 == 0 && out.numel() % kWidth == 0;
  wide ? launch<R, kWidth>(stream, out, parts) : launch<R, 1>(stream, out, parts);
}

}  // namespace

void sum_of_ranks(void* stream, Tensor out, const RankParts& parts) {
  if (out.numel() == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  const bool widens = parts.dtype == DType::bf16 && out.dtype == DType::f32;
  const bool narrows = parts.dtype == DType::f32 && out.dtype == DType::bf16;
  MOEBIUS_ASSERT(out.dtype == parts.dtype || widens || narrows);
  if (widens) return sum<Rule<__nv_bfloat16, float, float>>(on, out, parts);
  if (narrows) return sum<Rule<float, float, __nv_bfloat16>>(on, out, parts);
  if (out.dtype == DType::f32) return sum<Rule<float, float>>(on, out, parts);
  if (out.dtype == DType::f64) return sum<Rule<double, double>>(on, out, parts);
  if (out.dtype == DType::i64) return sum<Rule<int64_t, uint64_t>>(on, out, parts);
  sum<Rule<__nv_bfloat16, float>>(on, out, parts);
}

}  // namespace moebius::cuda
