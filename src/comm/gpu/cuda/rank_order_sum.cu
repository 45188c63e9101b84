#include <cuda_bf16.h>

#include <algorithm>

#include "comm/gpu/cuda/rank_order_sum.h"
#include "device/cuda/cuda.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 264;  // two blocks for each multiprocessor of an H200

// These say how an element is added, like those in comm/rank_order_sum.cc.
struct F32 {
  using Element = float;
  using Sum = float;
};
struct F64 {
  using Element = double;
  using Sum = double;
};
struct I64 {
  using Element = int64_t;
  using Sum = uint64_t;
};
struct Bf16 {
  using Element = __nv_bfloat16;
  using Sum = float;
};

template <class Rule>
__device__ typename Rule::Sum load(typename Rule::Element x) {
  if constexpr (std::is_same_v<Rule, Bf16>)
    return __bfloat162float(x);
  else
    return static_cast<typename Rule::Sum>(x);
}

template <class Rule>
__device__ typename Rule::Element store(typename Rule::Sum x) {
  if constexpr (std::is_same_v<Rule, Bf16>)
    return __float2bfloat16_rn(x);
  else
    return static_cast<typename Rule::Element>(x);
}

// A group of kWidth elements that are loaded and stored at once.
template <class Rule, int kWidth>
struct alignas(sizeof(typename Rule::Element) * kWidth) Pack {
  typename Rule::Element at[kWidth];
};

// A thread owns every (blocks x threads)-th pack of out, which it reads once from each part and
// writes once.
template <class Rule, int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(typename Rule::Element* out, RankParts parts, int64_t num_packs) {
  using P = Pack<Rule, kWidth>;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_packs; i += step) {
    typename Rule::Sum sums[kWidth];
    for (int r = 0; r < parts.size; ++r) {
      const void* part =
          r == parts.own_rank ? parts.own : static_cast<const char*>(parts.arrived) + r * parts.stride_bytes;
      const P x = static_cast<const P*>(part)[i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[k] = r == 0 ? load<Rule>(x.at[k]) : sums[k] + load<Rule>(x.at[k]);
    }
    P y;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y.at[k] = store<Rule>(sums[k]);
    reinterpret_cast<P*>(out)[i] = y;
  }
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class Rule, int kWidth>
void launch(cudaStream_t stream, const Tensor& out, const RankParts& parts) {
  const int64_t num_packs = out.numel() / kWidth;
  const int blocks = static_cast<int>(std::min<int64_t>((num_packs + kThreads - 1) / kThreads, kMostBlocks));
  sum_kernel<Rule, kWidth>
      <<<blocks, kThreads, 0, stream>>>(static_cast<typename Rule::Element*>(out.data), parts, num_packs);
  check_launch("sum_in_rank_order");
}

template <class Rule>
void sum(cudaStream_t stream, const Tensor& out, const RankParts& parts) {
  constexpr int kWidth = 16 / sizeof(typename Rule::Element);
  const bool wide = is_aligned(out.data) && is_aligned(parts.own) && is_aligned(parts.arrived) &&
                    parts.stride_bytes % 16 == 0 && out.numel() % kWidth == 0;
  wide ? launch<Rule, kWidth>(stream, out, parts) : launch<Rule, 1>(stream, out, parts);
}

}  // namespace

void sum_in_rank_order(void* stream, Tensor out, const RankParts& parts) {
  if (out.numel() == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (out.dtype == DType::f32) return sum<F32>(on, out, parts);
  if (out.dtype == DType::f64) return sum<F64>(on, out, parts);
  if (out.dtype == DType::i64) return sum<I64>(on, out, parts);
  sum<Bf16>(on, out, parts);
}

}  // namespace moebius::cuda
