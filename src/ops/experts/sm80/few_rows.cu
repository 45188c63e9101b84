// expert_up and expert_down of few rows, as when text is generated. Then the time is that of reading the
// weights, so they are read once, straight into the registers of a product: a block owns 16 rows of a
// matrix, and its warps share k. The weights are the A operand of mma.sync and the tokens its columns.
//
// The order of k in a product does not matter, as long as both operands have it. So a lane reads 16
// bytes of a row at once, and these are its elements of two products.
//
// An element is a sum over k of each warp, in order, and then the sum of the warps, in order. The shape of the matrix
// alone says how many warps there are. So an element depends neither on the other rows nor on how many there are.
//
// The weights of a dense product are on their way before its inputs are there (ops/cuda/early_launch.h).
#include <algorithm>

#include "ops/cuda/early_launch.h"
#include "ops/experts/sm80/gated_words.h"
#include "ops/experts/sm80/operands.h"
#include "ops/sm80/mma.h"

namespace moebius::cuda::sm80 {
namespace {

constexpr int kMatrixRows = 16;  // rows of the matrix that a block owns
constexpr int kStepK = 32;       // k of a warp's two products

struct Params {
  const char *w, *x;
  const int32_t *offsets, *index;  // null: one expert has all rows; row r reads x[r]
  void* y;                         // [R, N], or null
  uint16_t *h, *a;                 // null without an activation
  ColumnBias bias;
  WordActivation activation;
  int32_t num_rows, num_experts, N, K;
  bool reads_chunks, writes_chunks;  // all chunks of rows of w and x, or of the results, begin at multiples of 16 bytes
};

// Stores eight columns, or the first n where they are no whole chunk.
__device__ __forceinline__ void store_words(uint16_t* to, const uint32_t (&words)[4], int32_t n, bool in_chunks) {
  if (in_chunks)
    store_chunk(to, words);
  else
    store_elements(to, words, n);
}
__device__ __forceinline__ void store_words(uint16_t* to, const float (&x)[8], int32_t n, bool in_chunks) {
  uint32_t words[4];
  pack(words, x);
  store_words(to, words, n, in_chunks);
}
__device__ __forceinline__ void store_words(float* to, const float (&x)[8], int32_t n, bool in_chunks) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    if (in_chunks) {
      *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
      continue;
    }
#pragma unroll
    for (int j = i; j < i + 4; ++j) {
      if (j < n) to[j] = x[j];
    }
  }
}

// The two matrix rows that a lane reads, and its part of `kAhead` steps of them.
struct MatrixRows {
  const char *low, *high;
  bool has_low, has_high;
};
template <int kAhead>
struct Steps {
  uint4 low[kAhead], high[kAhead];

  // k: of the lane's first element; the steps are `stride` apart.
  __device__ __forceinline__ void fetch_from(const MatrixRows& w, int32_t k, int32_t stride, int32_t K) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int32_t at = k + u * stride;
      const bool has_k = at < K;
      const int64_t bytes = has_k ? int64_t{at} * 2 : 0;
      low[u] = fetch_word(reinterpret_cast<const uint4*>(w.low + bytes), has_k && w.has_low);
      high[u] = fetch_word(reinterpret_cast<const uint4*>(w.high + bytes), has_k && w.has_high);
    }
  }
};

// The 16 matrix rows of a block, which begin at `first`. With an activation they are 8 gate rows and the 8 up rows of
// the same f.
template <bool kGated>
struct BlockRows {
  int32_t first, F, N;
  __device__ __forceinline__ explicit BlockRows(const Params& p)
      : first(blockIdx.x * (kGated ? kMatrixRows / 2 : kMatrixRows)), F(p.N / 2), N(p.N) {}
  __device__ __forceinline__ int32_t row(int i) const { return kGated && i >= 8 ? F + first + i - 8 : first + i; }
  __device__ __forceinline__ bool has(int i) const { return row(i) < (kGated && i < 8 ? F : N); }
};

struct ExpertRows {
  int32_t expert, begin, end;
};

// The expert of this block. Where experts are more than rows, block y of the grid has the expert whose rows begin at y,
// if there is one.
__device__ __forceinline__ ExpertRows expert_rows(const Params& p) {
  if (!p.offsets) return {0, 0, p.num_rows};
  auto expert = static_cast<int32_t>(blockIdx.y);
  const auto row = expert;
  const bool by_row = gridDim.y < p.num_experts;
  if (by_row) {
    int32_t before = 0;
#pragma unroll 4
    for (int32_t e = threadIdx.x % 32; e < p.num_experts; e += 32) before += p.offsets[e + 1] <= row;
    expert = __reduce_add_sync(0xffffffffu, before);
    if (expert == p.num_experts) return {0, 0, 0};
  }
  const ExpertRows rows{expert, p.offsets[expert], p.offsets[expert + 1]};
  return by_row && rows.begin != row ? ExpertRows{0, 0, 0} : rows;
}

// Returns the blocks that share a multiprocessor. With more of them the compiler would have too few registers for
// several loads at once.
constexpr int blocks_together(int tiles, int warps) { return (tiles == 2 ? 24 : 16) / warps; }

// The sizes of a block of kWarps warps, whose chunks have kTiles groups of 8 rows.
template <int kTiles, int kWarps>
struct Block {
  static constexpr int kRows = kTiles * 8;
  static constexpr int kAhead = kTiles * kWarps > 32 ? 2 : 4;  // steps whose loads are on their way at once
  static constexpr int kStride = kWarps * kStepK, kRound = kAhead * kStride;
  static constexpr bool kIsDouble = kTiles == 1;  // the next round's weights come while this one's are multiplied
};

template <int kTiles, int kWarps>
struct Shared {
  float of_warps[kWarps][kTiles * 8][kMatrixRows + 1];
  float sums[kTiles * 8][kMatrixRows];
};

// The rows of x that a lane reads: row `group` of each group of 8 rows.
template <int kTiles>
struct TokenRows {
  const char* x[kTiles];
  bool has_row[kTiles];

  __device__ __forceinline__ TokenRows(const Params& p, int32_t r0, int32_t end) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int32_t r = r0 + 8 * i + threadIdx.x % 32 / 4;
      has_row[i] = r < end;
      x[i] = p.x + (has_row[i] ? (p.index ? p.index[r] : r) : 0) * (int64_t{p.K} * 2);
    }
  }
};

// Sends the first round of the weights of a lane to registers, and the others of the block to the L2 cache.
template <int kTiles, int kWarps, bool kGated>
__device__ __forceinline__ MatrixRows open_weights(Steps<Block<kTiles, kWarps>::kAhead>& next, const Params& p,
                                                   const BlockRows<kGated>& rows, int32_t expert, bool reads_chunks) {
  using B = Block<kTiles, kWarps>;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int64_t row_bytes = int64_t{p.K} * 2;
  const char* matrix = p.w + int64_t{expert} * p.N * row_bytes;
  const bool has_low = rows.has(group), has_high = rows.has(group + 8);
  const MatrixRows w{.low = matrix + (has_low ? rows.row(group) : 0) * row_bytes,
                     .high = matrix + (has_high ? rows.row(group + 8) : 0) * row_bytes,
                     .has_low = has_low,
                     .has_high = has_high};
  if (reads_chunks) next.fetch_from(w, warp * kStepK + quad * 8, B::kStride, p.K);
  if (B::kIsDouble && p.offsets) return w;
  for (int32_t j = warp; j < kMatrixRows; j += kWarps) {
    if (!rows.has(j)) continue;
    for (int64_t at = B::kRound * 2 + threadIdx.x % 32 * 128; at < row_bytes; at += 32 * 128)
      prefetch_line(matrix + rows.row(j) * row_bytes + at);
  }
  return w;
}

// A warp's sums over its share of k. acc[i]: rows 8 i to 8 i + 7, in the places of an mma's result. is_first: `next`
// has the first round of the weights.
template <int kTiles, int kWarps>
__device__ __forceinline__ void multiply_chunks(float (&acc)[kTiles][4], Steps<Block<kTiles, kWarps>::kAhead>& next,
                                                const MatrixRows& w, const TokenRows<kTiles>& rows, int32_t K,
                                                bool is_first) {
  using B = Block<kTiles, kWarps>;
  const int warp = threadIdx.x / 32, quad = threadIdx.x % 4;
  for (int32_t k0 = warp * kStepK; k0 < K; k0 += B::kRound) {
    const bool is_here = B::kIsDouble ? k0 >= B::kRound || is_first : k0 < B::kRound && is_first;
    if (!is_here) next.fetch_from(w, k0 + quad * 8, B::kStride, K);
    const Steps<B::kAhead> a = next;
    uint4 b[B::kAhead][kTiles];
#pragma unroll
    for (int u = 0; u < B::kAhead; ++u) {
      const int32_t k = k0 + quad * 8 + u * B::kStride;
      const int64_t at = k < K ? int64_t{k} * 2 : 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        b[u][i] = fetch_word(reinterpret_cast<const uint4*>(rows.x[i] + at), k < K && rows.has_row[i]);
    }
    if constexpr (B::kIsDouble) next.fetch_from(w, k0 + quad * 8 + B::kRound, B::kStride, K);
#pragma unroll
    for (int u = 0; u < B::kAhead; ++u) {
      const uint32_t first_a[4] = {a.low[u].x, a.high[u].x, a.low[u].y, a.high[u].y},
                     second_a[4] = {a.low[u].z, a.high[u].z, a.low[u].w, a.high[u].w};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        multiply(acc[i], first_a, b[u][i].x, b[u][i].y);
        multiply(acc[i], second_a, b[u][i].z, b[u][i].w);
      }
    }
  }
}

// The same products in the same order, one step at a time, of rows that are no whole chunks.
template <int kTiles, int kWarps>
__device__ __forceinline__ void multiply_elements(float (&acc)[kTiles][4], const MatrixRows& w,
                                                  const TokenRows<kTiles>& rows, int32_t K) {
  const int quad = threadIdx.x % 4;
#pragma unroll 1
  for (int32_t k = threadIdx.x / 32 * kStepK + quad * 8; k - quad * 8 < K; k += Block<kTiles, kWarps>::kStride) {
    uint32_t a_low[4], a_high[4];
    load_elements(a_low, w.low + int64_t{k} * 2, w.has_low ? K - k : 0);
    load_elements(a_high, w.high + int64_t{k} * 2, w.has_high ? K - k : 0);
    const uint32_t first_a[4] = {a_low[0], a_high[0], a_low[1], a_high[1]},
                   second_a[4] = {a_low[2], a_high[2], a_low[3], a_high[3]};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t b[4];
      load_elements(b, rows.x[i] + int64_t{k} * 2, rows.has_row[i] ? K - k : 0);
      multiply(acc[i], first_a, b[0], b[1]);
      multiply(acc[i], second_a, b[2], b[3]);
    }
  }
}

// Adds the sums of the warps in order, after the bias.
template <int kTiles, int kWarps, bool kGated>
__device__ __forceinline__ void add_warps(Shared<kTiles, kWarps>& shared, const float (&acc)[kTiles][4],
                                          const Params& p, const BlockRows<kGated>& rows, int32_t expert) {
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) shared.of_warps[warp][8 * i + 2 * quad + j % 2][group + j / 2 * 8] = acc[i][j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTiles * 8 * kMatrixRows; i += kWarps * 32) {
    const int row = i / kMatrixRows, col = i % kMatrixRows;
    float sum = p.bias.b ? p.bias.at(expert, rows.row(col)) : 0.0f;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) sum += shared.of_warps[j][row][col];
    shared.sums[row][col] = sum;
  }
  __syncthreads();
}

// Stores the 8 gate and 8 up values of row r, and their activation.
__device__ __forceinline__ void store_activated(const Params& p, const BlockRows<true>& rows, int64_t r,
                                                const float (&sums)[kMatrixRows], bool writes_chunks) {
  const int32_t first = rows.first, F = rows.F;
  uint32_t gate[4], up[4], a[4];
  float x_gate[8], x_up[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    x_gate[j] = sums[j];
    x_up[j] = sums[8 + j];
  }
  pack(gate, x_gate);
  pack(up, x_up);
  uint16_t* h = p.h + r * p.N + first;
  store_words(h, gate, F - first, writes_chunks);
  store_words(h + F, up, F - first, writes_chunks);
  activate(a, p.activation, gate, up);
  store_words(p.a + r * F + first, a, F - first, writes_chunks);
}

// Stores the results of rows r0 to end from `sums`.
template <class Y, int kWarps, int kRows, bool kGated>
__device__ __forceinline__ void store_results(const Params& p, const BlockRows<kGated>& rows,
                                              const float (&sums)[kRows][kMatrixRows], int32_t r0, int32_t end,
                                              bool writes_chunks) {
  for (int i = threadIdx.x; i < (kGated ? kRows : 2 * kRows); i += kWarps * 32) {
    const int row = kGated ? i : i / 2;
    const int32_t r = r0 + row;
    if (r >= end) continue;
    if constexpr (kGated) {
      store_activated(p, rows, r, sums[row], writes_chunks);
    } else {
      const int col = i % 2 * 8;
      const int32_t at = rows.first + col;
      if (at >= p.N) continue;
      float y[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = sums[row][col + j];
      store_words(static_cast<Y*>(p.y) + int64_t{r} * p.N + at, y, p.N - at, writes_chunks);
    }
  }
}

// kTiles: groups of 8 rows that share each read of the weights. Y: the type of an element of y.
template <int kTiles, int kWarps, bool kGated, class Y>
__global__ void __launch_bounds__(kWarps * 32, blocks_together(kTiles, kWarps)) few_rows_kernel(Params p) {
  using B = Block<kTiles, kWarps>;
  // Rows of other widths have one group: with more of them, the compiler would have too few registers.
  const bool reads_chunks = kTiles > 1 || p.reads_chunks, writes_chunks = kTiles > 1 || p.writes_chunks;
  __shared__ Shared<kTiles, kWarps> shared;
  if (!p.offsets) let_next_start();
  const BlockRows<kGated> rows(p);
  Steps<B::kAhead> next;
  MatrixRows w;
  if (!p.offsets) w = open_weights<kTiles, kWarps>(next, p, rows, 0, reads_chunks);
  wait_for_inputs();
  if (p.offsets) let_next_start();  // expert_down may read the offsets at once
  const ExpertRows of = expert_rows(p);
  if (of.begin >= of.end) return;
  if (p.offsets) w = open_weights<kTiles, kWarps>(next, p, rows, of.expert, reads_chunks);

  for (int32_t r0 = of.begin; r0 < of.end; r0 += B::kRows) {
    const TokenRows<kTiles> tokens(p, r0, of.end);
    float acc[kTiles][4] = {};
    if (reads_chunks)
      multiply_chunks<kTiles, kWarps>(acc, next, w, tokens, p.K, r0 == of.begin);
    else
      multiply_elements<kTiles, kWarps>(acc, w, tokens, p.K);
    add_warps<kTiles, kWarps>(shared, acc, p, rows, of.expert);
    store_results<Y, kWarps>(p, rows, shared.sums, r0, of.end, writes_chunks);
    __syncthreads();
  }
}

// Where blocks are few and sums are long, a block has more warps.
bool takes_more_warps(const Params& p) { return !p.offsets && p.N <= 4096 && p.K >= 4096; }

// rows_together: about the number of rows of an expert.
template <bool kGated, class Y>
void launch_few_rows(Stream& s, const Params& p, int64_t rows_together) {
  const dim3 grid(static_cast<unsigned>(div_ceil(p.N, kMatrixRows)),
                  static_cast<unsigned>(p.offsets ? std::min(p.num_experts, p.num_rows) : 1));
  const auto run = [&]<int kTiles, int kWarps>() {
    launch_kernel(s, true, {.blocks = grid, .threads = kWarps * 32}, few_rows_kernel<kTiles, kWarps, kGated, Y>, p);
  };
  const auto with_tiles = [&]<int kWarps>() {
    if (rows_together <= 8 || !p.reads_chunks || !p.writes_chunks)
      run.template operator()<1, kWarps>();
    else if (rows_together <= 16)
      run.template operator()<2, kWarps>();
    else
      run.template operator()<4, kWarps>();
  };
  if constexpr (!kGated) {
    if (takes_more_warps(p)) return with_tiles.template operator()<16>();
  }
  with_tiles.template operator()<8>();
}

// Where there are several experts, each of them has few of the rows.
int64_t rows_together(const Rows& rows, int64_t num_rows) {
  return rows.offsets_e1.empty() ? num_rows : std::min<int64_t>(num_rows, 16);
}

bool takes_result(const Tensor& y) { return y.dtype == DType::f32 || takes_matrix(y); }

}  // namespace

bool takes_few_rows(const ExpertUp& a) { return a.few_rows && takes(a); }
bool takes_few_rows(const ExpertDown& a) {
  return a.few_rows && takes_matrix(a.a_RF.data) && takes_weights(a.w2_eDF.data) && takes_result(a.y_RD);
}

void expert_up_few_rows(Stream& s, const ExpertUp& a) {
  const Tensor& w = a.w1_e2FD.data;
  const Params p{.w = static_cast<const char*>(w.data),
                 .x = static_cast<const char*>(a.x_TD.data.data),
                 .offsets = a.rows.offsets_e1.empty() ? nullptr : a.rows.offsets_e1.ptr<int32_t>(),
                 .index = index_of(a.rows),
                 .y = nullptr,
                 .h = halves(a.h_R2F),
                 .a = halves(a.a_RF),
                 .bias = column_bias(a.b1_e2F, 0),
                 .activation = WordActivation(a.activation),
                 .num_rows = narrow<int32_t>(a.a_RF.dim(0)),
                 .num_experts = narrow<int32_t>(w.dim(0)),
                 .N = narrow<int32_t>(w.dim(1)),
                 .K = narrow<int32_t>(w.dim(2)),
                 .reads_chunks = is_in_chunks(w) && is_in_chunks(a.x_TD.data),
                 .writes_chunks = is_in_chunks(a.h_R2F) && is_in_chunks(a.a_RF)};
  launch_few_rows<true, uint16_t>(s, p, rows_together(a.rows, a.x_TD.data.dim(0)));
}

void expert_down_few_rows(Stream& s, const ExpertDown& a) {
  const Tensor& w = a.w2_eDF.data;
  const Params p{.w = static_cast<const char*>(w.data),
                 .x = static_cast<const char*>(a.a_RF.data.data),
                 .offsets = a.rows.offsets_e1.empty() ? nullptr : a.rows.offsets_e1.ptr<int32_t>(),
                 .index = nullptr,
                 .y = a.y_RD.data,
                 .h = nullptr,
                 .a = nullptr,
                 .bias = column_bias(a.b2_eC, a.b2_first),
                 .activation = {},
                 .num_rows = narrow<int32_t>(a.y_RD.dim(0)),
                 .num_experts = narrow<int32_t>(w.dim(0)),
                 .N = narrow<int32_t>(w.dim(1)),
                 .K = narrow<int32_t>(w.dim(2)),
                 .reads_chunks = is_in_chunks(w) && is_in_chunks(a.a_RF.data),
                 .writes_chunks = is_in_chunks(a.y_RD)};
  const int64_t together = rows_together(a.rows, a.y_RD.dim(0));
  if (a.y_RD.dtype == DType::f32) return launch_few_rows<false, float>(s, p, together);
  launch_few_rows<false, uint16_t>(s, p, together);
}

}  // namespace moebius::cuda::sm80
