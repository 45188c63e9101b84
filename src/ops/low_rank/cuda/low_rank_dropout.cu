// A warp owns a row, and a lane neighbouring columns of it. The draws are those of the CPU, bit for bit.
#include "device/cuda/cuda.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank_dropout.h"
#include "ops/low_rank/low_rank_dropout_bits.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

template <class T>
struct Dropout {
  T* y;
  const T* x;
  const int64_t* draw;
  const int32_t *index, *token, *offsets;
  int32_t experts_here;
  bool gather, accumulate;
  int64_t num_rows, width, first_expert, num_experts, first_column, num_columns;
  uint32_t threshold;
  DeviceRng any_step;
};

// Returns the expert of a row, which is below the last offset.
__device__ __forceinline__ int32_t expert_of(const int32_t* offsets, int32_t count, int64_t row) {
  int32_t low = 0, high = count - 1;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (row < offsets[middle + 1])
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const __grid_constant__ Dropout<T> a) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const bool grouped = a.offsets != nullptr;
  if (row >= a.num_rows || (grouped && (row < a.offsets[0] || row >= a.offsets[a.experts_here]))) return;
  const int64_t expert = a.first_expert + (grouped ? expert_of(a.offsets, a.experts_here, row) : 0);
  const int64_t token = a.token != nullptr ? a.token[row] : row, from = a.gather ? token : row;
  const uint64_t first =
      dropout_row(a.index[token], expert, a.num_experts, a.num_columns) + static_cast<uint64_t>(a.first_column);
  const DeviceRng rng = a.any_step.at_step(static_cast<uint64_t>(a.draw[0]));
  for (int64_t c = int64_t{threadIdx.x % 32} * kNum; c < a.width; c += 32 * kNum) {
    float x[kNum], y[kNum];
    load(x, a.x + from * a.width + c);
    if (a.accumulate) load(y, a.y + row * a.width + c);
    uint64_t element = first + static_cast<uint64_t>(c);
    uint2 words = rng.bits(element / 2);
#pragma unroll
    for (int i = 0; i < kNum; ++i, ++element) {
      if (i > 0 && element % 2 == 0) words = rng.bits(element / 2);
      const bool keep = (element % 2 == 0 ? words.x : words.y) >= a.threshold;
      x[i] = a.accumulate ? (keep ? y[i] + x[i] : y[i]) : (keep ? x[i] : 0.0f);
    }
    store(a.y + row * a.width + c, x);
  }
}

__global__ void __launch_bounds__(kThreads)
    row_tokens_kernel(int32_t* index, int64_t n, const int64_t* draw, TokenOfRow token) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r < n) index[r] = static_cast<int32_t>(draw[1] + token_of(token, r));
}

}  // namespace

void row_tokens(Stream& s, const RowTokens& a) {
  const int64_t n = a.index_T.numel();
  row_tokens_kernel<<<static_cast<unsigned>(div_ceil(n, int64_t{kThreads})), kThreads, 0, cuda_stream(s)>>>(
      a.index_T.ptr<int32_t>(), n, a.draw_2.ptr<int64_t>(), a.token);
  check_launch("row_tokens");
}

void low_rank_dropout(Stream& s, const LowRankDropout& a) {
  const Tensor &offsets = a.rows.offsets_e1, &token = a.rows.token_R;
  with_float_type(a.y_RK.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Dropout<T> d{.y = a.y_RK.ptr<T>(),
                       .x = a.x_TK.ptr<T>(),
                       .draw = a.draw.draw_2.ptr<int64_t>(),
                       .index = a.draw.index_N.ptr<int32_t>(),
                       .token = token.empty() ? nullptr : token.ptr<int32_t>(),
                       .offsets = offsets.empty() ? nullptr : offsets.ptr<int32_t>(),
                       .experts_here = offsets.empty() ? 1 : static_cast<int32_t>(offsets.numel() - 1),
                       .gather = a.gather,
                       .accumulate = a.accumulate,
                       .num_rows = a.y_RK.dim(0),
                       .width = a.y_RK.dim(1),
                       .first_expert = a.draw.first_expert,
                       .num_experts = a.draw.num_experts,
                       .first_column = a.draw.first_column,
                       .num_columns = a.draw.num_columns,
                       .threshold = dropout_threshold(a.draw.rate),
                       .any_step = DeviceRng(Rng(a.draw.seed, RngSite::dropout, 0, a.draw.matrix))};
    const auto blocks = static_cast<unsigned>(div_ceil(d.num_rows, int64_t{kWarps}));
    if (d.width % kPerVector<T> == 0)
      dropout_kernel<kPerVector<T>><<<blocks, kThreads, 0, cuda_stream(s)>>>(d);
    else
      dropout_kernel<1><<<blocks, kThreads, 0, cuda_stream(s)>>>(d);
  });
  check_launch("low_rank_dropout");
}

}  // namespace moebius::cuda
