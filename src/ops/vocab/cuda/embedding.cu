#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/vocab/vocab.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAtOnce = 16;  // rows in flight to a thread

// The tokens that have rows in a table: [first, first + rows). A table that is not a block has all tokens.
struct Table {
  int32_t first, rows;
  bool is_block;

  // Returns the row of a token; of a block `rows` for those of other blocks.
  __device__ __forceinline__ int32_t row(int32_t token) const {
    const int32_t row = token - first;
    const bool is_here = 0 <= row && row < rows;
    require(is_here || is_block);
    return is_here ? row : rows;
  }
};
template <class Op>
Table table_of(const Op& a, int64_t rows) {
  return {narrow<int32_t>(a.first), narrow<int32_t>(rows), a.is_block};
}

// Block [t, part] copies 128 vectors of row t.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads)
    embedding_fwd_kernel(T* x, const int32_t* token, const T* w, Table table, int64_t width) {
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kNum, t = blockIdx.x;
  let_next_start();
  wait_for_inputs();
  if (column >= width) return;
  const int64_t from = table.row(token[t]);
  *reinterpret_cast<Raw<T, kNum>*>(x + t * width + column) =
      fetch<kNum>(w + (from < table.rows ? from * width : 0) + column, from < table.rows);
}

struct Occurrence {
  int32_t row, t;
};

constexpr int kSortThreads = 1024, kWarps = kSortThreads / 32;
constexpr int kDigitBits = 6, kDigits = 1 << kDigitBits;

// Returns the lanes of this warp whose digit is this lane's; lanes without one have digit -1.
__device__ __forceinline__ uint32_t lanes_with(int digit) {
  uint32_t lanes = __ballot_sync(0xffffffffu, digit >= 0);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const uint32_t set = __ballot_sync(0xffffffffu, (digit >> bit) & 1);
    lanes &= (digit >> bit) & 1 ? set : ~set;
  }
  return lanes;
}

struct Sort {
  Occurrence *even, *odd;  // the inputs of even and odd passes; the result is in the input of the pass after the last
  const int32_t* token;
  Table table;
  int64_t tokens;
  int num_passes;
};

// Occurrences i, i + 32, ... of a warp's part, a few at once so that their loads overlap; first
// pass: from the tokens.
template <class F>
__device__ __forceinline__ void each_occurrence(const Sort& a, int pass, int64_t begin, int64_t end, F&& fn) {
  constexpr int kLoads = 4;
  const Occurrence* from = pass % 2 ? a.odd : a.even;
  for (int64_t first = begin; first < end; first += 32 * kLoads) {
    Occurrence o[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = min(first + i * 32 + threadIdx.x % 32, end - 1);
      o[i] = pass == 0 ? Occurrence{a.table.row(a.token[at]), static_cast<int32_t>(at)} : from[at];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_mine = first + i * 32 + threadIdx.x % 32 < end;
      const int digit = is_mine ? o[i].row >> (pass * kDigitBits) & (kDigits - 1) : -1;
      fn(o[i], digit, lanes_with(digit));
    }
  }
}

// One block sorts all tokens by their rows: one digit per pass, from the lowest. Equal rows stay in the order of t. A
// warp has a part of consecutive occurrences; places[digit][warp] is where its next one with that digit goes.
__global__ void __launch_bounds__(kSortThreads) sort_tokens_kernel(Sort a) {
  __shared__ int32_t places[kDigits][kWarps + 1];  // + 1: columns in different banks
  __shared__ int32_t totals[kDigits];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t part = (a.tokens + 32 * kWarps - 1) / (32 * kWarps) * 32;
  const int64_t begin = min(a.tokens, warp * part), end = min(a.tokens, begin + part);
  for (int pass = 0; pass < a.num_passes; ++pass) {
    for (int digit = lane; digit < kDigits; digit += 32) places[digit][warp] = 0;
    __syncwarp();
    each_occurrence(a, pass, begin, end, [&](Occurrence, int digit, uint32_t lanes) {
      if (digit >= 0 && lane == __ffs(lanes) - 1) places[digit][warp] += __popc(lanes);
      __syncwarp();
    });
    __syncthreads();
    // Converts counts to positions: first within a digit, then after all smaller digits.
    if (threadIdx.x < kDigits) {
      int32_t sum = 0;
      for (int w = 0; w < kWarps; ++w) {
        const int32_t count = places[threadIdx.x][w];
        places[threadIdx.x][w] = sum;
        sum += count;
      }
      totals[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int32_t sum = 0;
      for (int digit = 0; digit < kDigits; ++digit) {
        const int32_t count = totals[digit];
        totals[digit] = sum;
        sum += count;
      }
    }
    __syncthreads();
    Occurrence* to = pass % 2 ? a.even : a.odd;
    each_occurrence(a, pass, begin, end, [&](Occurrence o, int digit, uint32_t lanes) {
      if (digit >= 0) to[totals[digit] + places[digit][warp] + __popc(lanes & ((1u << lane) - 1))] = o;
      __syncwarp();
      if (digit >= 0 && lane == __ffs(lanes) - 1) places[digit][warp] += __popc(lanes);
      __syncwarp();
    });
    __syncthreads();
  }
}

// Block [i, part]: if occurrence i is the first of its row, it computes 128 vectors of that row of dw. Row `rows`
// stands for no row.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads, 4) add_occurrences_kernel(float* dw, const T* dx, const Occurrence* sorted,
                                                                      int64_t tokens, int64_t rows, int64_t width) {
  const int64_t first = blockIdx.x, column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kNum;
  const int32_t row = sorted[first].row;
  if (column >= width || row == rows || (first > 0 && sorted[first - 1].row == row)) return;
  float* to = dw + row * width + column;
  float sum[kNum];
  load(sum, to);
  bool more = true;
  for (int64_t i = first; more; i += kAtOnce) {
    Raw<T, kNum> raw[kAtOnce];
    bool is_same[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const Occurrence o = sorted[min(i + j, tokens - 1)];
      is_same[j] = i + j < tokens && o.row == row;
      raw[j] = fetch<kNum>(dx + o.t * width + column, is_same[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float term[kNum];
      unpack<T>(term, raw[j]);
#pragma unroll
      for (int k = 0; k < kNum; ++k) sum[k] = is_same[j] ? sum[k] + term[k] : sum[k];
    }
    more = is_same[kAtOnce - 1];
  }
  store(to, sum);
}

dim3 blocks_of(int64_t rows, int64_t width, int num) {
  return dim3(narrow<int>(rows), num_blocks(width, int64_t{kThreads} * num));
}

int num_passes(int64_t num_rows) {
  int passes = 1;
  while (int64_t{1} << (passes * kDigitBits) < num_rows) ++passes;
  return passes;
}

}  // namespace

void embedding_fwd(Stream& s, const EmbeddingFwd& a) {
  const int64_t tokens = a.x_TD.dim(0), width = a.x_TD.dim(1);
  const bool early = tokens <= kEarlyRows;
  const Table table = table_of(a, a.w_VD.dim(0));
  const int32_t* token = a.token_T.ptr<int32_t>();
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    T* x = a.x_TD.ptr<T>();
    const T* w = a.w_VD.ptr<T>();
    if (rows_are_aligned(width, sizeof(T), x, w))
      launch_kernel(s, early, {blocks_of(tokens, width, kNum), kThreads}, embedding_fwd_kernel<kNum, T>, x, token, w,
                    table, width);
    else
      launch_kernel(s, early, {blocks_of(tokens, width, 1), kThreads}, embedding_fwd_kernel<1, T>, x, token, w, table,
                    width);
    if (!rows_are_aligned(width, sizeof(T), x, w)) note_odd_rows(s, "embedding_fwd", a.x_TD.dtype, width);
  });
  check_launch("embedding_fwd");
}

void embedding_bwd(Stream& s, const EmbeddingBwd& a) {
  const int64_t tokens = a.dx_TD.dim(0), rows = a.dw_VD.dim(0), width = a.dx_TD.dim(1);
  auto* scratch = reinterpret_cast<Occurrence*>(a.scratch.ptr<uint8_t>());
  const Sort sort{.even = scratch,
                  .odd = scratch + tokens,
                  .token = a.token_T.ptr<int32_t>(),
                  .table = table_of(a, rows),
                  .tokens = tokens,
                  .num_passes = num_passes(a.is_block ? rows + 1 : rows)};
  sort_tokens_kernel<<<1, kSortThreads, 0, cuda_stream(s)>>>(sort);
  const Occurrence* sorted = sort.num_passes % 2 ? sort.odd : sort.even;
  with_float_type(a.dx_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    float* dw = a.dw_VD.ptr<float>();
    const T* dx = a.dx_TD.ptr<T>();
    if (rows_are_aligned(width, sizeof(T), dw, dx))
      add_occurrences_kernel<kNum>
          <<<blocks_of(tokens, width, kNum), kThreads, 0, cuda_stream(s)>>>(dw, dx, sorted, tokens, rows, width);
    else
      add_occurrences_kernel<1>
          <<<blocks_of(tokens, width, 1), kThreads, 0, cuda_stream(s)>>>(dw, dx, sorted, tokens, rows, width);
    if (!rows_are_aligned(width, sizeof(T), dw, dx)) note_odd_rows(s, "embedding_bwd", a.dx_TD.dtype, width);
  });
  check_launch("embedding_bwd");
}

}  // namespace moebius::cuda
