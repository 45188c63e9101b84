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

// kTiles: groups of 8 rows that share each read of the weights. Y: the type of an element of y. kGated: the block's
// 16 rows are 8 gate rows and the 8 up rows of the same f.
template <int kTiles, int kWarps, bool kGated, class Y>
__global__ void __launch_bounds__(kWarps * 32, blocks_together(kTiles, kWarps)) few_rows_kernel(Params p) {
  constexpr int kThreads = kWarps * 32, kRows = kTiles * 8;
  constexpr int kAhead = kTiles * kWarps > 32 ? 2 : 4;  // steps whose loads are on their way at once
  constexpr int kStride = kWarps * kStepK, kRound = kAhead * kStride;
  constexpr bool kIsDouble = kTiles == 1;  // the next round's weights come while this one's are multiplied
  // Rows of other widths have one group: with more of them, the compiler would have too few registers.
  const bool reads_chunks = kTiles > 1 || p.reads_chunks, writes_chunks = kTiles > 1 || p.writes_chunks;
  __shared__ float of_warps[kWarps][kRows][kMatrixRows + 1];
  __shared__ float sums[kRows][kMatrixRows];
  if (!p.offsets) let_next_start();
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int32_t first = blockIdx.x * (kGated ? kMatrixRows / 2 : kMatrixRows), F = p.N / 2;
  // The matrix rows of the products' rows `group` and `group` + 8.
  const int32_t low = first + group, high = kGated ? F + low : low + 8, own_k = warp * kStepK + quad * 8;
  const int64_t row_bytes = int64_t{p.K} * 2;
  MatrixRows w{.low = nullptr, .high = nullptr, .has_low = low < (kGated ? F : p.N), .has_high = high < p.N};
  // Puts the weights on their way: a round of them to registers, the others to the L2 cache.
  Steps<kAhead> next;
  const auto open = [&](int32_t expert) {
    const char* matrix = p.w + int64_t{expert} * p.N * row_bytes;
    w.low = matrix + (w.has_low ? low : 0) * row_bytes;
    w.high = matrix + (w.has_high ? high : 0) * row_bytes;
    if (reads_chunks) next.fetch_from(w, own_k, kStride, p.K);
    if (kIsDouble && p.offsets) return;
    for (int32_t j = warp; j < kMatrixRows; j += kWarps) {
      const int32_t row = kGated && j >= 8 ? F + first + j - 8 : first + j;
      if (row >= (kGated && j < 8 ? F : p.N)) continue;
      for (int64_t at = kRound * 2 + threadIdx.x % 32 * 128; at < row_bytes; at += 32 * 128)
        prefetch_line(matrix + row * row_bytes + at);
    }
  };
  if (!p.offsets) open(0);
  wait_for_inputs();
  if (p.offsets) let_next_start();  // expert_down may read the offsets at once
  const ExpertRows rows = expert_rows(p);
  if (rows.begin >= rows.end) return;
  if (p.offsets) open(rows.expert);

  for (int32_t r0 = rows.begin; r0 < rows.end; r0 += kRows) {
    const char* x[kTiles];
    bool has_row[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int32_t r = r0 + 8 * i + group;
      has_row[i] = r < rows.end;
      x[i] = p.x + (has_row[i] ? (p.index ? p.index[r] : r) : 0) * row_bytes;
    }
    float acc[kTiles][4] = {};
    for (int32_t k0 = warp * kStepK; reads_chunks && k0 < p.K; k0 += kRound) {
      const bool is_here = kIsDouble ? k0 >= kRound || r0 == rows.begin : k0 < kRound && r0 == rows.begin;
      if (!is_here) next.fetch_from(w, k0 + quad * 8, kStride, p.K);
      const Steps<kAhead> a = next;
      uint4 b[kAhead][kTiles];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int32_t k = k0 + quad * 8 + u * kStride;
        const int64_t at = k < p.K ? int64_t{k} * 2 : 0;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          b[u][i] = fetch_word(reinterpret_cast<const uint4*>(x[i] + at), k < p.K && has_row[i]);
      }
      if constexpr (kIsDouble) next.fetch_from(w, k0 + quad * 8 + kRound, kStride, p.K);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const uint32_t first_a[4] = {a.low[u].x, a.high[u].x, a.low[u].y, a.high[u].y},
                       second_a[4] = {a.low[u].z, a.high[u].z, a.low[u].w, a.high[u].w};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          multiply(acc[i], first_a, b[u][i].x, b[u][i].y);
          multiply(acc[i], second_a, b[u][i].z, b[u][i].w);
        }
      }
    }
    // The same products in the same order, one step at a time.
    if (!reads_chunks) {
#pragma unroll 1
      for (int32_t k = own_k; k - quad * 8 < p.K; k += kStride) {
        uint32_t a_low[4], a_high[4];
        load_elements(a_low, w.low + int64_t{k} * 2, w.has_low ? p.K - k : 0);
        load_elements(a_high, w.high + int64_t{k} * 2, w.has_high ? p.K - k : 0);
        const uint32_t first_a[4] = {a_low[0], a_high[0], a_low[1], a_high[1]},
                       second_a[4] = {a_low[2], a_high[2], a_low[3], a_high[3]};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          uint32_t b[4];
          load_elements(b, x[i] + int64_t{k} * 2, has_row[i] ? p.K - k : 0);
          multiply(acc[i], first_a, b[0], b[1]);
          multiply(acc[i], second_a, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) of_warps[warp][8 * i + 2 * quad + j % 2][group + j / 2 * 8] = acc[i][j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kMatrixRows; i += kThreads) {
      const int row = i / kMatrixRows, col = i % kMatrixRows;
      const int32_t n = kGated && col >= 8 ? F + first + col - 8 : first + col;
      float sum = p.bias.b ? p.bias.at(rows.expert, n) : 0.0f;
#pragma unroll
      for (int j = 0; j < kWarps; ++j) sum += of_warps[j][row][col];
      sums[row][col] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (kGated ? kRows : 2 * kRows); i += kThreads) {
      const int row = kGated ? i : i / 2;
      const int32_t r = r0 + row;
      if (r >= rows.end) continue;
      if constexpr (kGated) {
        uint32_t gate[4], up[4], a[4];
        float x_gate[8], x_up[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x_gate[j] = sums[row][j];
          x_up[j] = sums[row][8 + j];
        }
        pack(gate, x_gate);
        pack(up, x_up);
        uint16_t* h = p.h + int64_t{r} * p.N + first;
        store_words(h, gate, F - first, writes_chunks);
        store_words(h + F, up, F - first, writes_chunks);
        activate(a, p.activation, gate, up);
        store_words(p.a + int64_t{r} * F + first, a, F - first, writes_chunks);
      } else {
        const int col = i % 2 * 8;
        if (first + col >= p.N) continue;
        float x8[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x8[j] = sums[row][col + j];
        store_words(static_cast<Y*>(p.y) + int64_t{r} * p.N + first + col, x8, p.N - first - col, writes_chunks);
      }
    }
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
