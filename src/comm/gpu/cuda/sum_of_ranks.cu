#include <cuda_bf16.h>

#include <algorithm>

#include "comm/gpu/cuda/sum_of_ranks.h"
#include "device/cuda/cuda.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kMaxBlocks = 264;  // two blocks for each multiprocessor of an H200

// The rules for adding elements of each dtype, as in comm/rank_order_sum.cc.
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

constexpr int kMaxLevels = 8;

struct Radices {
  int at[kMaxLevels];
};

// The running sums of one pack: at[l] adds the parts, or the sums, of level l.
template <class Rule, int kWidth, int kLevels>
struct LevelSums {
  typename Rule::Sum at[kLevels][kWidth];
  int count[kLevels] = {};  // how many terms a sum has

  // Adds x to the sum of level l. A sum that is complete is added to the one above it.
  template <int l = 0>
  __device__ void add(const typename Rule::Sum (&x)[kWidth], const Radices& radices) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) at[l][k] = count[l] == 0 ? x[k] : at[l][k] + x[k];
    ++count[l];
    if constexpr (l + 1 < kLevels) {
      if (count[l] < radices.at[l]) return;
      count[l] = 0;
      add<l + 1>(at[l], radices);
    }
  }
};

// A thread owns every (blocks x threads)-th pack of out, which it reads once from each part and
// writes once.
template <class Rule, int kWidth, int kLevels>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(typename Rule::Element* out, RankParts parts, int size, Radices radices, int64_t num_packs) {
  using P = Pack<Rule, kWidth>;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_packs; i += step) {
    LevelSums<Rule, kWidth, kLevels> sums;
    for (int r = 0; r < size; ++r) {
      const void* part =
          r == parts.own_rank ? parts.own : static_cast<const char*>(parts.arrived) + r * parts.stride_bytes;
      const P pack = static_cast<const P*>(part)[i];
      typename Rule::Sum x[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[k] = load<Rule>(pack.at[k]);
      sums.add(x, radices);
    }
    P y;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y.at[k] = store<Rule>(sums.at[kLevels - 1][k]);
    reinterpret_cast<P*>(out)[i] = y;
  }
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class Rule, int kWidth, int kLevels>
void launch(cudaStream_t stream, const Tensor& out, const RankParts& parts, const CollectiveLevels& levels) {
  const int64_t num_packs = out.numel() / kWidth;
  const int blocks = static_cast<int>(std::min<int64_t>((num_packs + kThreads - 1) / kThreads, kMaxBlocks));
  Radices radices{};
  for (int l = 0; l < levels.count(); ++l) radices.at[l] = levels.radix(l);
  // Levels that a group does not have are sums of one term.
  for (int l = levels.count(); l < kMaxLevels; ++l) radices.at[l] = 1;
  sum_kernel<Rule, kWidth, kLevels><<<blocks, kThreads, 0, stream>>>(static_cast<typename Rule::Element*>(out.data),
                                                                     parts, levels.size(), radices, num_packs);
  check_launch("sum_of_ranks");
}

template <class Rule, int kWidth>
void launch(cudaStream_t stream, const Tensor& out, const RankParts& parts, const CollectiveLevels& levels) {
  MOEBIUS_ASSERT(levels.count() <= kMaxLevels);
  if (levels.count() == 1) return launch<Rule, kWidth, 1>(stream, out, parts, levels);
  if (levels.count() <= 4) return launch<Rule, kWidth, 4>(stream, out, parts, levels);
  launch<Rule, kWidth, kMaxLevels>(stream, out, parts, levels);
}

template <class Rule>
void sum(cudaStream_t stream, const Tensor& out, const RankParts& parts, const CollectiveLevels& levels) {
  constexpr int kWidth = 16 / sizeof(typename Rule::Element);
  const bool wide = is_aligned(out.data) && is_aligned(parts.own) && is_aligned(parts.arrived) &&
                    parts.stride_bytes % 16 == 0 && out.numel() % kWidth == 0;
  wide ? launch<Rule, kWidth>(stream, out, parts, levels) : launch<Rule, 1>(stream, out, parts, levels);
}

}  // namespace

void sum_of_ranks(void* stream, Tensor out, const RankParts& parts, const CollectiveLevels& levels) {
  if (out.numel() == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (out.dtype == DType::f32) return sum<F32>(on, out, parts, levels);
  if (out.dtype == DType::f64) return sum<F64>(on, out, parts, levels);
  if (out.dtype == DType::i64) return sum<I64>(on, out, parts, levels);
  sum<Bf16>(on, out, parts, levels);
}

}  // namespace moebius::cuda
