// d_expert_down by wgmma: g = dout[token] W2[e] in tiles of 128 rows by 256 columns of F, and the backward of the gated
// activation on the tile, rounded, while it is in registers. W2 is [D, F], so a tile of it stands across (MN-major).
//
// A block is a producer warpgroup and two consumer warpgroups of 64 rows, with a ring of slots between them:
//   num_k slots of 64 of D   A: rows of dout by cp.async;  B: W2 by TMA, half of it for the other block of the cluster
//   4 slots of 64 of F       the tile of h, gate and up, by TMA
// A consumer warp takes its 16 rows of an h slot to dh in place, puts sa beside it, and has the copy engine store all
// three from there; so h is fetched under the last products and stores drain under the next ones.
#include "core/cuda.h"
#include "ops/cuda/sm90_tensor_map.h"
#include "ops/cuda/swiglu.h"
#include "ops/experts/experts_cuda.h"
#include "ops/experts/row_tiles_cuda_sm90.h"
#include "ops/experts/slots_cuda_sm90.h"
#include "ops/experts/tiles_cuda_sm90.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kSlots = 4, kThreads = 384, kTilesToStagger = 8;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kPieces = kTileN / 64;
constexpr uint32_t kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
constexpr uint32_t kPlaneBytes = kTileM * 64 * 2;  // 128 rows of gate, of up, of sa

struct Params {
  CUtensorMap w2, h, dh, sa;
  RowTiles tiles;
  const __nv_bfloat16* dout;
  __nv_bfloat16 *to_dh, *to_sa;
  const float* weight;  // null: 1
  float* partial;       // [column tiles, R]; null: not wanted
  const int32_t* token;
  int64_t R;
  int32_t D, F, num_k;
};

using Ring = Slots<kSlots, kBytesA + kBytesB>;  // 128 rows of 64, then 4 blocks of 64 x 64; or planes
using Cursor = cuda::Ring<kSlots>;
constexpr uint32_t kSharedBytes = kSlots * (kBytesA + kBytesB) + Ring::kBarrierBytes;
static_assert(kSharedBytes <= 227 * 1024 && 3 * kPlaneBytes <= kBytesA + kBytesB);

// The gathered rows of a producer thread: 16-byte column chunk thread % 8 of rows thread / 8 + 16 i. A row past the end
// reads the last one, and makes a row of g that goes nowhere. This has to keep up with the tensor cores: a copy is one
// instruction, from an address in registers of its own.
struct GatheredRows {
  static constexpr int kNum = kTileM / 16;
  int32_t source[kNum];
  const char* from[kNum];

  // Starts to read where the rows of a tile are; begin, later, waits for it.
  __device__ __forceinline__ void find(const Params& p, const RowTile& tile) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      source[i] = min(tile.first_row + static_cast<int32_t>(threadIdx.x / 8) + 16 * i, tile.end_row - 1);
    }
    if (p.token == nullptr) return;
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(source[i]) : "l"(p.token + source[i]));
    }
  }
  __device__ __forceinline__ void begin(const Params& p) {
    const char* chunk_of_row_0 = reinterpret_cast<const char*>(p.dout) + threadIdx.x % 8 * 16;
#pragma unroll
    for (int i = 0; i < kNum; ++i) from[i] = chunk_of_row_0 + static_cast<uint64_t>(source[i]) * (p.D * 2);
  }
  // The next 64 of D.
  __device__ __forceinline__ void copy(uint32_t to) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) cp_async_16(to + i * 16 * 128, from[i], true);
#pragma unroll
    for (int i = 0; i < kNum; ++i) from[i] += kTileK * 2;
  }
  // Where fewer than 64 are left.
  __device__ __forceinline__ void copy_last(uint32_t to, const Params& p, bool inside) {
    for (int i = 0; i < kNum; ++i)
      cp_async_16(to + i * 16 * 128, inside ? from[i] : reinterpret_cast<const char*>(p.dout), inside);
  }
};

// 64 of D by 256 columns of W2[e], the halves by both blocks or both by this one.
__device__ __forceinline__ void load_weights(const Params& p, const Ring& ring, uint32_t slot, int k,
                                             const RowTile& tile, uint32_t block) {
  const uint32_t full = ring.full(slot);
  mbarrier_arrive_expect(full, kBytesB);
#pragma unroll
  for (uint32_t i = 0; i < kTileN / 64; ++i) {
    const uint32_t to = ring.slot(slot) + kBytesA + i * 8192;
    const int32_t col = tile.n * kTileN + static_cast<int32_t>(i) * 64;
    if (!tile.shared) {
      tma_load(to, &p.w2, full, col, k * kTileK, tile.expert);
    } else if (i / 2 == block) {
      tma_load_multicast(to, &p.w2, full, 3, col, k * kTileK, tile.expert);
    }
  }
}

// Gate and up of 64 columns.
__device__ __forceinline__ void load_h(const Params& p, const Ring& ring, uint32_t slot, int piece,
                                       const RowTile& tile) {
  const int32_t col = tile.n * kTileN + piece * 64;
  mbarrier_arrive_expect(ring.full(slot), 2 * kPlaneBytes);
  tma_load(ring.slot(slot), &p.h, ring.full(slot), col, 0, tile.first_row);
  tma_load(ring.slot(slot) + kPlaneBytes, &p.h, ring.full(slot), col, 1, tile.first_row);
}

// All tiles take the same time, so all blocks would be in their epilogues together and wait for memory together.
// Clusters start one after the other, over the time of a tile; those that start last have one tile less, or as many.
__device__ void stagger(const Params& p) {
  const int num_clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  const int64_t rows = p.tiles.offset(p.tiles.num_experts) - p.tiles.offset(0);
  if (rows * p.tiles.across < int64_t{kTilesToStagger} * 2 * num_clusters * kTileM) return;
  const int64_t cycles = (p.num_k * int64_t{1100} + 7000) * cluster / num_clusters, begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(500);
}

// One warp loads by TMA, each in turn.
__device__ __forceinline__ bool my_turn(uint32_t slot) { return threadIdx.x == 32 * slot; }

__device__ void produce(const Params& p, const Ring& ring, uint32_t block) {
  const uint32_t chunk = threadIdx.x % 8, place = swizzle_128(threadIdx.x / 8, chunk);
  RowTileWalk walk(p.tiles, block);
  RowTile tile, next;
  GatheredRows rows;
  Cursor at;
  stagger(p);
  bool more = walk.next(next);
  if (more) rows.find(p, next);
  while (more) {
    tile = next;
    rows.begin(p);
#pragma unroll 1
    for (int k = 0; k < p.num_k; ++k, at.advance()) {
      mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
      const uint32_t to = ring.slot(at.stage) + place;
      if (k * kTileK + kTileK <= p.D) {
        rows.copy(to);
      } else {
        rows.copy_last(to, p, k * kTileK + static_cast<int>(chunk) * 8 < p.D);
      }
      mbarrier_arrive_cp_async(ring.full(at.stage));
      if (my_turn(at.stage)) load_weights(p, ring, at.stage, k, tile, block);
    }
    more = walk.next(next);
    if (more) rows.find(p, next);
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece, at.advance()) {
      mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive(ring.full(at.stage));
      if (my_turn(at.stage)) load_h(p, ring, at.stage, piece, tile);
    }
  }
}

// Rows [64 group, 64 group + 64) of the tile. A slot is released once the wgmmas of the next one are queued.
__device__ __forceinline__ void multiply(const Params& p, const Ring& ring, Cursor& at, uint32_t group,
                                         float (&g)[128]) {
  const bool one_lane = threadIdx.x % 32 == 0;
  const SlotOperand<Major::k> a(ring.first + group * (kBytesA / 2), 8192);
  const SlotOperand<Major::mn> b(ring.first + kBytesA, 8192);
  uint32_t before = 0;
#pragma unroll 1
  for (int k = 0; k < p.num_k; ++k) {
    mbarrier_wait(ring.full(at.stage), at.parity);
    fence_proxy_async();  // cp.async writes as ordinary stores do
    const uint32_t slot = at.stage * (kBytesA + kBytesB);
    hold_registers(g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      Wgmma<Major::k, Major::mn>::multiply(g, a.at(slot + i * 32), b.at(slot + i * 2048), k > 0 || i > 0);
    }
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      if (one_lane) ring.release(before);
    }
    before = at.stage;
    at.advance();
  }
  wgmma_wait<0>();
  hold_registers(g);
  if (one_lane) ring.release(before);
}

// What a tile does to the ring, for a warpgroup without rows.
__device__ void skip_tile(const Params& p, const Ring& ring, Cursor& at) {
  for (int k = 0; k < p.num_k + kPieces; ++k, at.advance()) {
    mbarrier_wait(ring.full(at.stage), at.parity);
    if (threadIdx.x % 32 == 0) ring.release(at.stage);
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ uint4 load_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

struct Gradient {
  float dgate, dup, a;  // a is not yet rounded
};
__device__ __forceinline__ Gradient backward(float da, float gate, float up) {
  const float z = approximate_sigmoid(gate);
  const SwigluGradient d = swiglu_gradient(da, gate, z, up);
  return {d.dgate, d.dup, swiglu(gate, z, up)};
}

// 16 rows of a consumer warp in the tile.
struct WarpRows {
  int32_t in_tile, first, num, col;  // num may be more than 16, or less than 1
  float weight[2];                   // of rows lane / 4 and 8 more

  __device__ WarpRows(const Params& p, const RowTile& tile)
      : in_tile(static_cast<int32_t>(threadIdx.x / 32 - 4) * 16),
        first(tile.first_row + in_tile),
        num(tile.end_row - first),
        col(tile.n * kTileN) {
    const int32_t row = static_cast<int32_t>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      weight[i] = p.weight && row + 8 * i < num ? __ldg(p.weight + first + row + 8 * i) : 1.0f;
  }
};

// The warp's rows of the planes at `planes` from h to dh and sa, columns [32 kHalf, 32 kHalf + 32) of the 64 of g from
// kPiece * 64 on; product gathers <g, a> of this thread's two rows.
template <int kPiece, uint32_t kHalf>
__device__ __forceinline__ void backward_planes(uint32_t planes, const float (&g)[128], const WarpRows& rows,
                                                float (&product)[2]) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t j = 2 * kHalf; j < 2 * kHalf + 2; ++j) {
    const uint32_t at = planes + swizzle_128(rows.in_tile + lane % 16, 2 * j + lane / 16);
    uint32_t gate[4], up[4], sa[4];
    load_matrices(gate, at);
    load_matrices(up, at + kPlaneBytes);
#pragma unroll
    for (int m = 0; m < 4; ++m) {  // rows + 8 (m % 2), columns + 8 (m / 2)
      const int i = m % 2, at_g = kPiece * 32 + j * 8 + m / 2 * 4 + i * 2;
      const uint32_t g01 = pack_bf16(g[at_g], g[at_g + 1]);
      const float g0 = low_bf16(g01), g1 = high_bf16(g01), weight = rows.weight[i];
      const Gradient lo = backward(__fmul_rn(weight, g0), low_bf16(gate[m]), low_bf16(up[m]));
      const Gradient hi = backward(__fmul_rn(weight, g1), high_bf16(gate[m]), high_bf16(up[m]));
      gate[m] = pack_bf16(lo.dgate, hi.dgate);
      up[m] = pack_bf16(lo.dup, hi.dup);
      const uint32_t a = pack_bf16(lo.a, hi.a);  // as expert_up rounded it
      product[i] = fmaf(g1, high_bf16(a), fmaf(g0, low_bf16(a), product[i]));
      sa[m] = pack_bf16(weight * low_bf16(a), weight * high_bf16(a));
    }
    stmatrix_4(at, gate[0], gate[1], gate[2], gate[3]);
    stmatrix_4(at + kPlaneBytes, up[0], up[1], up[2], up[3]);
    stmatrix_4(at + 2 * kPlaneBytes, sa[0], sa[1], sa[2], sa[3]);
  }
}

// The planes' 16 rows to dh and sa, by one lane.
__device__ __forceinline__ void store_rows(const Params& p, uint32_t planes, const WarpRows& rows, int piece) {
  const uint32_t from = planes + rows.in_tile * 128;
  const int32_t col = rows.col + piece * 64;
  tma_store(&p.dh, from, col, 0, rows.first);
  tma_store(&p.dh, from + kPlaneBytes, col, 1, rows.first);
  tma_store(&p.sa, from + 2 * kPlaneBytes, col, rows.first);
}

// As store_rows where the expert ends within the 16 rows: those of the next one stay as they are. By the whole warp.
__device__ void store_last_rows(const Params& p, uint32_t planes, const WarpRows& rows, int piece) {
  const int32_t lane = threadIdx.x % 32, col = rows.col + piece * 64 + lane % 8 * 8;
  for (int32_t row = lane / 8; row < min(rows.num, 16); row += 4) {
    const uint32_t from = planes + swizzle_128(rows.in_tile + row, lane % 8);
    const int64_t r = rows.first + row;
    if (col >= p.F) continue;
    *reinterpret_cast<uint4*>(p.to_dh + 2 * r * p.F + col) = load_16(from);
    *reinterpret_cast<uint4*>(p.to_dh + (2 * r + 1) * p.F + col) = load_16(from + kPlaneBytes);
    *reinterpret_cast<uint4*>(p.to_sa + r * p.F + col) = load_16(from + 2 * kPlaneBytes);
  }
  fence_proxy_async();
  __syncwarp();
}

// The h slots of a tile. A slot is released in the middle of the next piece, when its stores have been read.
template <int kPiece>
__device__ __forceinline__ void backward_pieces(const Params& p, const Ring& ring, Cursor& at, const WarpRows& rows,
                                                const float (&g)[128], float (&product)[2], uint32_t before) {
  if constexpr (kPiece < kPieces) {
    const bool one_lane = threadIdx.x % 32 == 0;
    const uint32_t slot = at.stage, planes = ring.slot(slot);
    mbarrier_wait(ring.full(slot), at.parity);
    backward_planes<kPiece, 0>(planes, g, rows, product);
    if (kPiece > 0 && one_lane) {
      tma_wait_read<0>();
      ring.release(before);
    }
    backward_planes<kPiece, 1>(planes, g, rows, product);
    fence_proxy_async();
    __syncwarp();
    if (rows.num < 16) store_last_rows(p, planes, rows, kPiece);
    if (one_lane) {
      if (rows.num >= 16) store_rows(p, planes, rows, kPiece);
      tma_commit();
      if (kPiece + 1 == kPieces) {
        tma_wait_read<0>();
        ring.release(slot);
      }
    }
    __syncwarp();
    at.advance();
    backward_pieces<kPiece + 1>(p, ring, at, rows, g, product, slot);
  }
}

__device__ void store_products(const Params& p, const RowTile& tile, const WarpRows& rows, const float (&product)[2]) {
  const int32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = product[i];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int32_t row = lane / 4 + 8 * i;
    if (p.partial && lane % 4 == 0 && row < rows.num) p.partial[tile.n * p.R + rows.first + row] = sum;
  }
}

__device__ void consume(const Params& p, const Ring& ring, uint32_t block) {
  const uint32_t group = uniform(threadIdx.x / 128 - 1);
  RowTileWalk walk(p.tiles, block);
  Cursor at;
  for (RowTile tile; walk.next(tile);) {
    if (tile.first_row + static_cast<int32_t>(group) * 64 >= tile.end_row || tile.n >= p.tiles.across) {
      skip_tile(p, ring, at);
      continue;
    }
    const WarpRows rows(p, tile);
    float g[128];
    multiply(p, ring, at, group, g);
    float product[2] = {};
    backward_pieces<0>(p, ring, at, rows, g, product, 0);
    store_products(p, tile, rows, product);
  }
  tma_wait<0>();
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    d_expert_down_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t first = uniform(smem_addr(memory)), block = cluster_block_rank();
  const Ring ring{first, first + kSlots * (kBytesA + kBytesB)};
  if (threadIdx.x == 0) ring.init(128 + 1, 2 * 8);  // each producer thread, and the bytes; the warps of both blocks
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<kProducerRegisters>();
    produce(p, ring, block);
  } else {
    more_registers<kConsumerRegisters>();
    consume(p, ring, block);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

struct State {
  int num_blocks = persistent_blocks(reinterpret_cast<const void*>(d_expert_down_kernel), kSharedBytes);
};

}  // namespace

bool takes(const DExpertDown& a) {
  return a.dout_TD.dtype == DType::bf16 && a.sa_RF.dim(0) < INT32_MAX - 2 * kTileM &&
         a.dout_TD.numel() / 8 < INT32_MAX && rows_are_aligned({a.dout_TD, a.sa_RF}) &&
         aligned_16({a.w2_eDF, a.h_R2F, a.dh_R2F});
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.dim(1), E = a.w2_eDF.dim(0);
  const auto elements = [](const Tensor& t) { return static_cast<__nv_bfloat16*>(t.data); };
  const auto num_columns = static_cast<int32_t>(div_ceil(F, kTileN));
  const bool weighted = !a.weight_R.empty();
  const auto planes = [&](const Tensor& h, uint32_t rows) {
    return make_tensor_map<3>(h.data, {{{F, 1, 64}, {2, F, 1}, {R, 2 * F, rows}}});
  };
  const Params p{
      .w2 = make_tensor_map<3>(a.w2_eDF.data, {{{F, 1, 64}, {D, F, kTileK}, {E, D * F, 1}}}),
      .h = planes(a.h_R2F, kTileM),
      .dh = planes(a.dh_R2F, 16),
      .sa = make_tensor_map<2>(a.sa_RF.data, {{{F, 1, 64}, {R, F, 16}}}),
      .tiles = row_tiles(a.rows, R, num_columns),
      .dout = elements(a.dout_TD),
      .to_dh = elements(a.dh_R2F),
      .to_sa = elements(a.sa_RF),
      .weight = weighted ? a.weight_R.ptr<float>() : nullptr,
      .partial = weighted ? static_cast<float*>(a.scratch.data) : nullptr,
      .token = index_of(a.rows),
      .R = R,
      .D = static_cast<int32_t>(D),
      .F = static_cast<int32_t>(F),
      .num_k = static_cast<int32_t>(div_ceil(D, kTileK)),
  };
  d_expert_down_kernel<<<op_state<State>(s).num_blocks, kThreads, kSharedBytes, cuda_stream(s)>>>(p);
  check_launch("d_expert_down");
  if (weighted) add_dweight_partials(s, a, num_columns);
}

}  // namespace moebius::cuda::sm90
