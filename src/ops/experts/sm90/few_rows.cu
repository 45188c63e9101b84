// expert_up and expert_down of few rows on Hopper. The time is that of reading the weights of the experts that have
// rows. So blocks that live as long as the kernel stream them: a warp of copies keeps a ring of shared memory full,
// across the tiles of the block, and kWarps multiply, eight or sixteen. A tile is 16 rows of one matrix, and a stage
// of the ring holds 64 kWarps of k.
//
// The elements have the bits of ops/experts/sm80/few_rows.cu: warp w sums k = 32 w + 32 kWarps j + [0, 32) in the order
// of j, and then the sums of the warps are added in order.
//
// Launches overlap (ops/cuda/early_launch.h). expert_up lets expert_down start when its own inputs are there. The
// offsets are complete by then, so expert_down reads them at once, and has its ring full when expert_up ends.
#include "ops/experts/sm90/few_rows.h"

#include <algorithm>
#include <initializer_list>

#include "device/gpu_limits.h"
#include "ops/cuda/early_launch.h"
#include "ops/experts/sm80/gated_words.h"
#include "ops/experts/sm80/operands.h"
#include "ops/sm80/mma.h"
#include "ops/sm90/copy.h"

namespace moebius::cuda::sm90 {
namespace {

using sm80::ColumnBias;
using sm80::WordActivation;

constexpr int kMatrixRows = 16;  // of a tile
constexpr int kMaxChunks = 320;

// A block's sizes: kWarps warps multiply, and one more copies.
template <int kWarps>
struct Block {
  static constexpr int kMultiplying = kWarps * 32, kThreads = kMultiplying + 32;
  static constexpr int kStepK = kWarps * 32, kStageK = 2 * kStepK;
  static constexpr int kPitch = kStageK * 2 + 64;  // bytes between rows of a stage: lanes then read from all banks
  static constexpr int kStageBytes = kMatrixRows * kPitch;
};

// Blocks that a multiprocessor holds together, and stages of the ring of each. kRows: of a chunk at most. The ring of
// 16 warps holds 4096 of k, so that all weights of a tile are on their way when the block begins.
constexpr int blocks_together(int rows, int warps) { return warps == 16 ? 1 : rows == 8 ? 3 : 2; }
constexpr int num_stages(int rows, int warps) { return warps == 16 ? 4 : rows == 8 ? 3 : 5; }

struct Params {
  const char *w, *x;
  const int32_t *offsets, *index;  // null: one expert has all rows; row r reads x[r]
  void* y;                         // [R, N], without an activation
  uint16_t *h, *a;                 // with an activation
  ColumnBias bias;
  WordActivation activation;
  int32_t num_rows, num_experts, N, K;
  bool rows_are_known;  // before the previous kernel ends
};

// Rows of one expert that read its weights together.
struct Chunk {
  int32_t expert, begin, count;
};

template <int kRows, int kWarps>
struct Shared {
  static constexpr int kStages = num_stages(kRows, kWarps);
  uint64_t full[kStages], empty[kStages];
  Chunk chunks[kMaxChunks];
  int32_t num_chunks;
  float of_warps[kWarps][kRows][kMatrixRows + 1];
  float sums[kRows][kMatrixRows];
};

// One warp lists the chunks of all experts that have rows. It reads the offsets from L2, since an earlier kernel on
// this multiprocessor may have left others in L1.
template <int kRows, int kWarps>
__device__ void list_chunks(Shared<kRows, kWarps>& shared, const Params& p) {
  constexpr int kAtOnce = 4;  // loads on their way
  const int lane = threadIdx.x % 32;
  int32_t num = 0;
  if (!p.offsets) {
    num = (p.num_rows + kRows - 1) / kRows;
    for (int32_t i = lane; i < num; i += 32) shared.chunks[i] = {0, i * kRows, min(kRows, p.num_rows - i * kRows)};
  }
  for (int32_t first = 0; p.offsets && first < p.num_experts; first += 32 * kAtOnce) {
    int32_t begin[kAtOnce], end[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int32_t e = first + 32 * j + lane;
      begin[j] = e < p.num_experts ? __ldcg(p.offsets + e) : 0;
      end[j] = e < p.num_experts ? __ldcg(p.offsets + e + 1) : 0;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int32_t own = (end[j] - begin[j] + kRows - 1) / kRows;
      int32_t inclusive = own;
#pragma unroll
      for (int width = 1; width < 32; width *= 2) {
        const int32_t before = __shfl_up_sync(0xffffffffu, inclusive, width);
        if (lane >= width) inclusive += before;
      }
      for (int32_t i = 0; i < own; ++i) {
        const int32_t at = begin[j] + i * kRows;
        shared.chunks[num + inclusive - own + i] = {first + 32 * j + lane, at, min(kRows, end[j] - at)};
      }
      num += __shfl_sync(0xffffffffu, inclusive, 31);
    }
  }
  if (lane == 0) shared.num_chunks = num;
}

// The rows of a matrix that are a tile's. The tile of an activation has 8 gate rows and the 8 up rows of the same f.
template <bool kGated>
struct TileRows {
  int32_t first, F, N;
  __device__ __forceinline__ TileRows(const Params& p, int32_t tile)
      : first(tile * (kGated ? kMatrixRows / 2 : kMatrixRows)), F(p.N / 2), N(p.N) {}
  __device__ __forceinline__ bool has(int i) const { return kGated || first + i < N; }
  __device__ __forceinline__ int32_t row(int i) const { return kGated && i >= 8 ? F + first + i - 8 : first + i; }
  __device__ __forceinline__ int count() const { return kGated ? kMatrixRows : min(kMatrixRows, N - first); }
};

__device__ __forceinline__ void store_words(uint16_t* to, const float (&x)[8]) {
  uint32_t words[4];
  sm80::pack(words, x);
  sm80::store_chunk(to, words);
}
__device__ __forceinline__ void store_words(float* to, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// The blocks of a launch share the tiles of all chunks: item i is tile i % tiles of chunk i / tiles.
struct Items {
  int32_t first, end, stride, tiles;
};

// The ring of shared memory: its stages from base on, and their barriers.
struct RingPlaces {
  uint32_t base, full, empty;
};

// The warp of copies reads the weights of the items of its block. A lane copies a row of a tile.
template <int kWarps, bool kGated, int kStages>
__device__ __forceinline__ void copy_weights(const Params& p, const Chunk* chunks, const Items& items,
                                             const RingPlaces& at, Ring<kStages> ring) {
  using B = Block<kWarps>;
  const int lane = threadIdx.x % 32;
  const int64_t row_bytes = int64_t{p.K} * 2;
  for (int32_t item = items.first; item < items.end; item += items.stride) {
    const TileRows<kGated> rows(p, item % items.tiles);
    const bool has_row = lane < kMatrixRows && rows.has(lane);
    const int64_t row = int64_t{chunks[item / items.tiles].expert} * p.N + (has_row ? rows.row(lane) : 0);
    const char* from = p.w + row * row_bytes;
    for (int32_t k = 0; k < p.K; k += B::kStageK) {
      const auto bytes = static_cast<uint32_t>(min(B::kStageK, p.K - k) * 2);
      mbarrier_wait(at.empty + 8 * ring.stage, ring.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(at.full + 8 * ring.stage, bytes * rows.count());
      __syncwarp();
      if (has_row)
        bulk_load(at.base + ring.stage * B::kStageBytes + lane * B::kPitch, from + int64_t{k} * 2, bytes,
                  at.full + 8 * ring.stage);
      ring.advance();
    }
  }
}

// A warp's sums over its share of k. acc[i]: rows 8 i to 8 i + 7 of the chunk, in the places of an mma's result.
template <int kWarps, bool kGated, int kTiles, int kStages>
__device__ __forceinline__ void multiply_tile(float (&acc)[kTiles][4], const Params& p, const TileRows<kGated>& rows,
                                              const Chunk& chunk, const RingPlaces& at, Ring<kStages>& ring) {
  using B = Block<kWarps>;
  constexpr bool kIsDouble = kTiles == 1;  // the next stage's rows of x come while this one's are multiplied
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int32_t own_k = threadIdx.x / 32 * 32 + quad * 8;
  const int used_tiles = (chunk.count + 7) / 8;
  const bool has_low = rows.has(group), has_high = rows.has(group + 8);
  const char* x[kTiles];
  bool has_row[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    has_row[i] = 8 * i + group < chunk.count;
    const int32_t r = chunk.begin + 8 * i + group;
    x[i] = p.x + (has_row[i] ? (p.index ? p.index[r] : r) : 0) * (int64_t{p.K} * 2);
  }
  uint4 next[2][kTiles];
  const auto fetch_rows = [&](int32_t k0) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int32_t k = k0 + u * B::kStepK + own_k;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        next[u][i] = fetch_word(reinterpret_cast<const uint4*>(x[i] + (k < p.K ? k : 0) * 2), k < p.K && has_row[i]);
    }
  };
  if (kIsDouble) fetch_rows(0);
  for (int32_t k0 = 0; k0 < p.K; k0 += B::kStageK) {
    uint4 b[2][kTiles];
    if (!kIsDouble) fetch_rows(k0);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) b[u][i] = next[u][i];
    }
    if (kIsDouble && k0 + B::kStageK < p.K) fetch_rows(k0 + B::kStageK);
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    const uint32_t from = at.base + ring.stage * B::kStageBytes + group * B::kPitch + own_k * 2;
    uint4 low[2], high[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      low[u] = load_shared(from + u * B::kStepK * 2);
      high[u] = load_shared(from + u * B::kStepK * 2 + 8 * B::kPitch);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(at.empty + 8 * ring.stage);
    ring.advance();
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool has_k = k0 + u * B::kStepK + own_k < p.K;
      if (!(has_k && has_low)) low[u] = {};
      if (!(has_k && has_high)) high[u] = {};
      const uint32_t first_a[4] = {low[u].x, high[u].x, low[u].y, high[u].y},
                     second_a[4] = {low[u].z, high[u].z, low[u].w, high[u].w};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i >= used_tiles) continue;
        sm80::multiply(acc[i], first_a, b[u][i].x, b[u][i].y);
        sm80::multiply(acc[i], second_a, b[u][i].z, b[u][i].w);
      }
    }
  }
}

// Adds the sums of the warps in order, after the bias. All warps that multiply call it.
template <int kRows, int kWarps, bool kGated>
__device__ __forceinline__ void add_warps(Shared<kRows, kWarps>& shared, const float (&acc)[kRows / 8][4],
                                          const Params& p, const TileRows<kGated>& rows, const Chunk& chunk) {
  constexpr int kMultiplying = Block<kWarps>::kMultiplying;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) {
    if (i >= (chunk.count + 7) / 8) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) shared.of_warps[warp][8 * i + 2 * quad + j % 2][group + j / 2 * 8] = acc[i][j];
  }
  named_barrier_sync(1, kMultiplying);
  for (int i = threadIdx.x; i < chunk.count * kMatrixRows; i += kMultiplying) {
    const int r = i / kMatrixRows, col = i % kMatrixRows;
    float sum = p.bias.b ? p.bias.at(chunk.expert, rows.row(col)) : 0.0f;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) sum += shared.of_warps[j][r][col];
    shared.sums[r][col] = sum;
  }
  named_barrier_sync(1, kMultiplying);
}

// Stores the 8 gate and 8 up values of row r, and their activation.
__device__ __forceinline__ void store_activated(const Params& p, const TileRows<true>& rows, int64_t r,
                                                const float (&sums)[kMatrixRows]) {
  uint32_t gate[4], up[4], a[4];
  float x_gate[8], x_up[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    x_gate[j] = sums[j];
    x_up[j] = sums[8 + j];
  }
  sm80::pack(gate, x_gate);
  sm80::pack(up, x_up);
  uint16_t* h = p.h + r * p.N + rows.first;
  sm80::store_chunk(h, gate);
  sm80::store_chunk(h + rows.F, up);
  sm80::activate(a, p.activation, gate, up);
  sm80::store_chunk(p.a + r * rows.F + rows.first, a);
}

// Stores the results of a tile from shared.sums.
template <int kRows, int kWarps, bool kGated, class Y>
__device__ __forceinline__ void store_tile(const Shared<kRows, kWarps>& shared, const Params& p,
                                           const TileRows<kGated>& rows, const Chunk& chunk) {
  for (int i = threadIdx.x; i < (kGated ? chunk.count : 2 * chunk.count); i += Block<kWarps>::kMultiplying) {
    const int64_t r = chunk.begin + (kGated ? i : i / 2);
    if constexpr (kGated) {
      store_activated(p, rows, r, shared.sums[i]);
    } else {
      const int col = i % 2 * 8;
      if (rows.first + col >= p.N) continue;
      float y[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = shared.sums[i / 2][col + j];
      store_words(static_cast<Y*>(p.y) + r * p.N + rows.first + col, y);
    }
  }
}

// kRows: of a chunk at most. Y: of the result.
template <int kRows, int kWarps, bool kGated, class Y>
__global__ void __launch_bounds__(Block<kWarps>::kThreads, blocks_together(kRows, kWarps)) few_rows_kernel(Params p) {
  constexpr int kStages = Shared<kRows, kWarps>::kStages;
  extern __shared__ __align__(128) char stages[];
  __shared__ Shared<kRows, kWarps> shared;
  const RingPlaces at{smem_addr(stages), smem_addr(shared.full), smem_addr(shared.empty)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(at.full + 8 * i, 1);
      mbarrier_init(at.empty + 8 * i, kWarps);
    }
    fence_mbarrier_init();
  }
  if (!p.rows_are_known) wait_for_inputs();
  let_next_start();
  if (threadIdx.x < 32) list_chunks(shared, p);
  __syncthreads();
  const int32_t tiles = (p.N + kMatrixRows - 1) / kMatrixRows;
  const Items items{static_cast<int32_t>(blockIdx.x), shared.num_chunks * tiles, static_cast<int32_t>(gridDim.x),
                    tiles};
  Ring<kStages> ring;
  if (threadIdx.x / 32 == kWarps) return copy_weights<kWarps, kGated>(p, shared.chunks, items, at, ring);

  if (p.rows_are_known) wait_for_inputs();
  for (int32_t item = items.first; item < items.end; item += items.stride) {
    const TileRows<kGated> rows(p, item % tiles);
    const Chunk chunk = shared.chunks[item / tiles];
    float acc[kRows / 8][4] = {};
    multiply_tile<kWarps>(acc, p, rows, chunk, at, ring);
    add_warps(shared, acc, p, rows, chunk);
    // The next tile's sums of warps may be written: all have passed the second barrier. Its sums are written after a
    // barrier that the threads here reach when they have stored theirs.
    store_tile<kRows, kWarps, kGated, Y>(shared, p, rows, chunk);
  }
}

// The chunks of R rows of e experts are at most so many.
int64_t max_chunks(int64_t e, int64_t R, int64_t rows_of_chunk) { return std::min(e, R) + R / rows_of_chunk; }

template <int kRows, int kWarps, bool kGated, class Y>
void launch(Stream& s, const Params& p) {
  constexpr int kShared = num_stages(kRows, kWarps) * Block<kWarps>::kStageBytes, kThreads = Block<kWarps>::kThreads;
  const int64_t tiles = div_ceil(p.N, kMatrixRows), items = max_chunks(p.num_experts, p.num_rows, kRows) * tiles;
  const int64_t blocks = std::min<int64_t>(items, blocks_together(kRows, kWarps) * gpu_limits(s).num_multiprocessors);
  const auto kernel = few_rows_kernel<kRows, kWarps, kGated, Y>;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_kernel(s, true, {.blocks = static_cast<unsigned>(blocks), .threads = kThreads, .shared_bytes = kShared},
                kernel, p);
}

// The rule of ops/experts/sm80/few_rows.cu for dense products.
bool takes_more_warps(int64_t N, int64_t K) { return N <= 4096 && K >= 4096; }

// Chunks of 8 rows keep more weights on their way. An expert of more rows is then read once for each of its chunks, so
// they are for calls where that is rare.
template <bool kGated, class Y>
void launch_few_rows(Stream& s, const Params& p) {
  if constexpr (!kGated) {
    if (!p.offsets && takes_more_warps(p.N, p.K)) return launch<8, 16, kGated, Y>(s, p);
  }
  if (!p.offsets || p.num_rows <= int64_t{4} * p.num_experts) return launch<8, 8, kGated, Y>(s, p);
  launch<32, 8, kGated, Y>(s, p);
}

// w: [e, N, K]. Dense products of more rows, or of few columns and short sums, gain nothing here.
bool takes_shape(const Rows& rows, const Tensor& w, int64_t num_rows, bool is_gated) {
  if (!rows.offsets_e1.empty()) return max_chunks(w.dim(0), num_rows, 8) <= kMaxChunks;
  if (is_gated || w.dim(1) > 4096) return num_rows <= 8;
  return num_rows <= 4 && takes_more_warps(w.dim(1), w.dim(2));
}

// A bulk copy, a load and a store are of whole chunks at multiples of 16 bytes, unlike those of the portable kernels.
bool are_in_chunks(std::initializer_list<Tensor> all) { return std::ranges::all_of(all, sm80::is_in_chunks); }

}  // namespace

bool takes_few_rows(const ExpertUp& a) {
  return sm80::takes_few_rows(a) && are_in_chunks({a.x_TD.data, a.w1_e2FD.data, a.h_R2F, a.a_RF}) &&
         takes_shape(a.rows, a.w1_e2FD.data, a.a_RF.dim(0), true);
}
bool takes_few_rows(const ExpertDown& a) {
  return sm80::takes_few_rows(a) && are_in_chunks({a.a_RF.data, a.w2_eDF.data, a.y_RD}) &&
         takes_shape(a.rows, a.w2_eDF.data, a.y_RD.dim(0), false);
}

void expert_up_few_rows(Stream& s, const ExpertUp& a) {
  const Tensor& w = a.w1_e2FD.data;
  const Params p{.w = static_cast<const char*>(w.data),
                 .x = static_cast<const char*>(a.x_TD.data.data),
                 .offsets = a.rows.offsets_e1.empty() ? nullptr : a.rows.offsets_e1.ptr<int32_t>(),
                 .index = index_of(a.rows),
                 .y = nullptr,
                 .h = sm80::halves(a.h_R2F),
                 .a = sm80::halves(a.a_RF),
                 .bias = sm80::column_bias(a.b1_e2F, 0),
                 .activation = WordActivation(a.activation),
                 .num_rows = narrow<int32_t>(a.a_RF.dim(0)),
                 .num_experts = narrow<int32_t>(w.dim(0)),
                 .N = narrow<int32_t>(w.dim(1)),
                 .K = narrow<int32_t>(w.dim(2)),
                 .rows_are_known = a.rows.offsets_e1.empty()};
  launch_few_rows<true, uint16_t>(s, p);
}

void expert_down_few_rows(Stream& s, const ExpertDown& a, bool after_up) {
  const Tensor& w = a.w2_eDF.data;
  const Params p{.w = static_cast<const char*>(w.data),
                 .x = static_cast<const char*>(a.a_RF.data.data),
                 .offsets = a.rows.offsets_e1.empty() ? nullptr : a.rows.offsets_e1.ptr<int32_t>(),
                 .index = nullptr,
                 .y = a.y_RD.data,
                 .h = nullptr,
                 .a = nullptr,
                 .bias = sm80::column_bias(a.b2_eC, a.b2_first),
                 .activation = {},
                 .num_rows = narrow<int32_t>(a.y_RD.dim(0)),
                 .num_experts = narrow<int32_t>(w.dim(0)),
                 .N = narrow<int32_t>(w.dim(1)),
                 .K = narrow<int32_t>(w.dim(2)),
                 .rows_are_known = after_up || a.rows.offsets_e1.empty()};
  if (a.y_RD.dtype == DType::f32) return launch_few_rows<false, float>(s, p);
  launch_few_rows<false, uint16_t>(s, p);
}

}  // namespace moebius::cuda::sm90
