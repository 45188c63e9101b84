// d_expert_down by wgmma: g = dout[token] W2[e] in tiles of 128 rows by 256 columns of F, and the backward of the gated
// activation on the tile while it is in registers. W2 is [D, F], so a tile of it stands across (MN-major).
//
// A block is a producer warpgroup (rows of dout by cp.async, W2 by TMA, half of it for the other block of the cluster)
// and two consumer warpgroups of 64 rows. A consumer warp owns 16 rows x 256 columns of g and takes them in pieces of
// 32 columns through a ring of its own in shared memory: h comes by cp.async (the first kAhead pieces before the main
// loop), dh goes back in its place and out, then sa the same way.
#include "core/cuda.h"
#include "ops/cuda/sm90.h"
#include "ops/cuda/sm90_tensor_map.h"
#include "ops/experts/experts_cuda.h"
#include "ops/experts/row_tiles_sm90.h"
#include "ops/experts/tiles_sm90.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kStaggerTiles = 8;
constexpr int kGroup = 8;  // pairs of row tiles that share a column of W2 tiles while it is in L2
constexpr int kSlots = 3, kAhead = 5, kThreads = 384;
constexpr uint32_t kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
constexpr int kPieceCols = 32, kPieces = kTileN / kPieceCols;
constexpr uint32_t kPlaneBytes = 16 * kPieceCols * 2;  // 16 rows of gate, of up, or of sa
constexpr uint32_t kPieceBytes = 2 * kPlaneBytes;

struct Shared {
  alignas(1024) unsigned char a[kSlots][kBytesA];  // 128 rows of 64
  alignas(1024) unsigned char b[kSlots][kBytesB];  // 4 blocks of 64 (of D) x 64 (of F)
  alignas(1024) unsigned char staging[8][kAhead * kPieceBytes];
  uint64_t full[kSlots], empty[kSlots];
};
static_assert(sizeof(Shared) <= 227 * 1024);

// A position in the ring of slots; producers and consumers walk it alike.
struct Cursor {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct Params {
  CUtensorMap w2;
  RowTiles tiles;
  const __nv_bfloat16 *dout, *h;
  __nv_bfloat16 *dh, *sa;
  const float* weight;
  float* partial;  // [column tiles, R]
  const int32_t* token;
  int64_t R;
  int32_t D, F, num_k;
};

// The gathered rows of a producer thread: 16-byte column chunk thread % 8 of rows thread / 8 + 16 i. A row past the end
// reads row 0, and makes a row of g that goes nowhere.
struct GatheredRows {
  static constexpr int kPerThread = kTileM / 16;
  uint32_t begins[kPerThread];  // in chunks
  __device__ GatheredRows(const Params& p, const RowTile& tile) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int32_t row = tile.first_row + static_cast<int32_t>(threadIdx.x / 8) + 16 * i;
      const bool valid = row < tile.end_row;
      begins[i] = valid ? static_cast<uint32_t>(p.token ? __ldg(p.token + row) : row) * (p.D / 8) : 0;
    }
  }
  __device__ void copy(uint32_t to, const char* chunk_of_row_0, bool inside) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      cp_async_16(to + i * 16 * 128, chunk_of_row_0 + static_cast<uint64_t>(begins[i]) * 16, inside);
    }
  }
};

// 64 of D by 256 columns of W2[e], the halves by both blocks or both by this one.
__device__ void load_weights(const Params& p, Shared& s, uint32_t slot, int k, const RowTile& tile, uint32_t block) {
  const uint32_t full = smem_addr(&s.full[slot]);
  mbarrier_arrive_expect(full, kBytesB);
#pragma unroll
  for (uint32_t i = 0; i < kTileN / 64; ++i) {
    const uint32_t to = smem_addr(s.b[slot]) + i * 8192;
    const int32_t col = tile.n * kTileN + static_cast<int32_t>(i) * 64;
    if (!tile.shared) {
      tma_load(to, &p.w2, full, col, k * kTileK, tile.expert);
    } else if (i / 2 == block) {
      tma_load_multicast(to, &p.w2, full, 3, col, k * kTileK, tile.expert);
    }
  }
}

// All tiles take the same time, so all blocks would be in their epilogues together and wait for memory together:
// clusters start one after the other, over the time of a tile.
__device__ void stagger(const Params& p) {
  const int num_clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  const int64_t rows = p.tiles.offsets[p.tiles.num_experts] - p.tiles.offsets[0];
  if (rows * p.tiles.across < static_cast<int64_t>(kStaggerTiles) * 2 * num_clusters * kTileM) return;
  const int64_t cycles = static_cast<int64_t>(p.num_k * 1400 + 7000) * cluster / num_clusters, begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(500);
}

__device__ void produce(const Params& p, Shared& s, uint32_t block) {
  const uint32_t chunk = threadIdx.x % 8, place = swizzle_128(threadIdx.x / 8, chunk);
  const char* x0 = reinterpret_cast<const char*>(p.dout);
  RowTileWalk walk(p.tiles, block);
  Cursor at;
  stagger(p);
  for (RowTile tile; walk.next(tile);) {
    const GatheredRows rows(p, tile);
    const char* x = x0 + chunk * 16;
#pragma unroll 1
    for (int k = 0; k < p.num_k; ++k, x += kTileK * 2) {
      mbarrier_wait(smem_addr(&s.empty[at.slot]), at.parity ^ 1);
      if (threadIdx.x == 0) load_weights(p, s, at.slot, k, tile, block);
      const bool inside = k * kTileK + static_cast<int>(chunk) * 8 < p.D;
      rows.copy(smem_addr(s.a[at.slot]) + place, inside ? x : x0, inside);
      mbarrier_arrive_cp_async(smem_addr(&s.full[at.slot]));
      at.advance();
    }
  }
}

// By a whole consumer warp: the slot may be filled again, by both blocks.
__device__ __forceinline__ void release(Shared& s, uint32_t slot) {
  if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(smem_addr(&s.empty[slot]), threadIdx.x % 32);
}

// Rows [64 group, 64 group + 64) of the tile. A slot is released once the wgmmas of the next one are queued.
__device__ __forceinline__ void multiply(const Params& p, Shared& s, Cursor& at, uint32_t group, float (&g)[128]) {
  uint32_t before = 0;
#pragma unroll 1
  for (int k = 0; k < p.num_k; ++k) {
    mbarrier_wait(smem_addr(&s.full[at.slot]), at.parity);
    fence_proxy_async();  // cp.async writes as ordinary stores do
    const uint64_t a = wgmma_operand<Major::k>(smem_addr(s.a[at.slot]) + group * (kBytesA / 2));
    const uint64_t b = wgmma_operand<Major::mn>(smem_addr(s.b[at.slot]));
    hold_registers(g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      Wgmma<Major::k, Major::mn>::multiply(g, a + (i * 32 >> 4), b + (i * 2048 >> 4), k > 0 || i > 0);
    }
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      release(s, before);
    }
    before = at.slot;
    at.advance();
  }
  wgmma_wait<0>();
  hold_registers(g);
  release(s, before);
}

// What multiply does to the ring, for a warpgroup without rows.
__device__ void skip_tile(const Params& p, Shared& s, Cursor& at) {
  for (int k = 0; k < p.num_k; ++k, at.advance()) {
    mbarrier_wait(smem_addr(&s.full[at.slot]), at.parity);
    release(s, at.slot);
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
  float dgate, dup, a;
};
// a is not yet rounded. With z = sigmoid(gate), silu = gate z:  da/dgate = up (z + silu (1 - z)),  da/dup = silu.
__device__ __forceinline__ Gradient backward(float da, float gate, float up) {
  const float z = reciprocal(1.0f + exp2_approx(gate * -1.44269504f)), silu = gate * z;
  return {da * up * (z + fmaf(-silu, z, silu)), da * silu, silu * up};
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a plane: rows of 64 bytes, and no two of 8 rows in one bank.
__device__ __forceinline__ uint32_t place_in_plane(uint32_t row, uint32_t chunk) {
  return row * 64 + ((chunk ^ (row / 2 & 3)) << 4);
}

// 16 rows of a consumer warp in the tile. A lane copies 16-byte chunk lane % 4 of rows lane / 4 + 8 i of a piece, and
// computes these rows too.
struct WarpRows {
  int32_t first, num;  // num may be more than 16, or less than 1
  int32_t cols;        // from the lane's first chunk to the end of F
  int64_t at, at_h;    // the lane's first chunk in sa and in h
  float weight[2];

  __device__ WarpRows(const Params& p, const RowTile& tile, uint32_t group)
      : first(tile.first_row + static_cast<int32_t>(group * 64 + threadIdx.x / 32 % 4 * 16)),
        num(tile.end_row - first) {
    const int32_t lane = threadIdx.x % 32, row = first + lane / 4, col = tile.n * kTileN + lane % 4 * 8;
    cols = p.F - col;
    at = static_cast<int64_t>(row) * p.F + col;
    at_h = at + static_cast<int64_t>(row) * p.F;
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = lane / 4 + 8 * i < num ? __ldg(p.weight + row + 8 * i) : 0.0f;
  }
  __device__ __forceinline__ bool has(int i, int piece) const {
    return static_cast<int32_t>(threadIdx.x % 32 / 4) + 8 * i < num && piece * kPieceCols < cols;
  }
};

// Starts to load a piece of h, gate and up.
__device__ __forceinline__ void load_piece(const Params& p, const WarpRows& rows, uint32_t staging, int piece) {
  const uint32_t lane = threadIdx.x % 32,
                 to = staging + piece % kAhead * kPieceBytes + place_in_plane(lane / 4, lane % 4);
  const __nv_bfloat16* from = p.h + rows.at_h + piece * kPieceCols;
#pragma unroll
  for (int i = 0; i < 2; ++i, from += 16 * p.F) {
    const bool valid = rows.has(i, piece);
    cp_async_16(to + i * 512, valid ? from : p.h, valid);
    cp_async_16(to + i * 512 + kPlaneBytes, valid ? from + p.F : p.h, valid);
  }
  cp_async_commit();
}

// What lies in a plane, to rows of global memory `stride` elements apart; `to` is the lane's first chunk.
__device__ __forceinline__ void store_plane(__nv_bfloat16* to, int32_t stride, uint32_t plane, const WarpRows& rows,
                                            int piece) {
  const uint32_t lane = threadIdx.x % 32, from = plane + place_in_plane(lane / 4, lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = load_16(from + i * 512);
    if (rows.has(i, piece)) *reinterpret_cast<uint4*>(to + i * 8 * static_cast<int64_t>(stride)) = v;
  }
}

// Piece kPiece of the tile: h is in the staging; dh and sa leave, product gathers <g, a> of this thread's two rows.
template <int kPiece>
__device__ __forceinline__ void backward_piece(const Params& p, const WarpRows& rows, const float (&g)[128],
                                               uint32_t staging, float (&product)[2]) {
  const uint32_t lane = threadIdx.x % 32, plane = staging + kPiece % kAhead * kPieceBytes;
  uint32_t sa[2][4];
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
    const uint32_t at = plane + place_in_plane(lane % 16, 2 * j + lane / 16);
    uint32_t gate[4], up[4];
    load_matrices(gate, at);
    load_matrices(up, at + kPlaneBytes);
#pragma unroll
    for (int m = 0; m < 4; ++m) {  // rows + 8 (m % 2), columns + 8 (m / 2)
      const int i = m % 2, at_g = kPiece * 16 + j * 8 + m / 2 * 4 + i * 2;
      const float g0 = g[at_g], g1 = g[at_g + 1], weight = rows.weight[i];
      const Gradient lo = backward(weight * g0, low_bf16(gate[m]), low_bf16(up[m]));
      const Gradient hi = backward(weight * g1, high_bf16(gate[m]), high_bf16(up[m]));
      gate[m] = pack_bf16(lo.dgate, hi.dgate);
      up[m] = pack_bf16(lo.dup, hi.dup);
      const uint32_t a = pack_bf16(lo.a, hi.a);  // as expert_up rounded it
      product[i] = fmaf(g1, high_bf16(a), fmaf(g0, low_bf16(a), product[i]));
      sa[j][m] = pack_bf16(weight * low_bf16(a), weight * high_bf16(a));
    }
    stmatrix_4(at, gate[0], gate[1], gate[2], gate[3]);
    stmatrix_4(at + kPlaneBytes, up[0], up[1], up[2], up[3]);
  }
  __syncwarp();
  store_plane(p.dh + rows.at_h + kPiece * kPieceCols, 2 * p.F, plane, rows, kPiece);
  store_plane(p.dh + rows.at_h + kPiece * kPieceCols + p.F, 2 * p.F, plane + kPlaneBytes, rows, kPiece);
  __syncwarp();
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
    stmatrix_4(plane + place_in_plane(lane % 16, 2 * j + lane / 16), sa[j][0], sa[j][1], sa[j][2], sa[j][3]);
  }
  __syncwarp();
  store_plane(p.sa + rows.at + kPiece * kPieceCols, p.F, plane, rows, kPiece);
  __syncwarp();
}

template <int kPiece>
__device__ __forceinline__ void backward_pieces(const Params& p, const WarpRows& rows, const float (&g)[128],
                                                uint32_t staging, float (&product)[2]) {
  if constexpr (kPiece < kPieces) {
    constexpr int kLater = kPieces - 1 - kPiece;  // pieces, of which at most kAhead - 1 were asked for
    cp_async_wait<(kLater < kAhead - 1 ? kLater : kAhead - 1)>();
    __syncwarp();
    backward_piece<kPiece>(p, rows, g, staging, product);
    if constexpr (kPiece + kAhead < kPieces) load_piece(p, rows, staging, kPiece + kAhead);
    backward_pieces<kPiece + 1>(p, rows, g, staging, product);
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
    if (lane % 4 == 0 && row < rows.num) p.partial[tile.n * p.R + rows.first + row] = sum;
  }
}

// Asks L2 for the row of h that this thread's place in the warpgroup names: gate, or up.
__device__ void prefetch_h(const Params& p, const RowTile& tile, uint32_t group) {
  const int32_t row = tile.first_row + static_cast<int32_t>(group * 64 + threadIdx.x % 64), col = tile.n * kTileN;
  if (row >= tile.end_row) return;
  const __nv_bfloat16* from = p.h + (2 * static_cast<int64_t>(row) + threadIdx.x / 64 % 2) * p.F + col;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(min(kTileN, p.F - col) * 2) : "memory");
}

__device__ void consume(const Params& p, Shared& s, uint32_t block) {
  const uint32_t group = threadIdx.x / 128 - 1, staging = smem_addr(s.staging[threadIdx.x / 32 - 4]);
  RowTileWalk walk(p.tiles, block);
  Cursor at;
  for (RowTile tile; walk.next(tile);) {
    if (tile.first_row + static_cast<int32_t>(group) * 64 >= tile.end_row || tile.n >= p.tiles.across) {
      skip_tile(p, s, at);
      continue;
    }
    prefetch_h(p, tile, group);
    const WarpRows rows(p, tile, group);
#pragma unroll
    for (int piece = 0; piece < kAhead; ++piece) load_piece(p, rows, staging, piece);
    float g[128];
    multiply(p, s, at, group, g);
    float product[2] = {};
    backward_pieces<0>(p, rows, g, staging, product);
    store_products(p, tile, rows, product);
  }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    d_expert_down_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const uint32_t block = cluster_block_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(smem_addr(&s.full[i]), 128 + 1);  // each producer thread, and the bytes of W2
      mbarrier_init(smem_addr(&s.empty[i]), 2 * 8);   // the consumer warps of both blocks
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    produce(p, s, block);
  } else {
    more_registers<232>();
    consume(p, s, block);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

struct State {
  int num_blocks = persistent_blocks(reinterpret_cast<const void*>(d_expert_down_kernel), sizeof(Shared));
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
  const Params p{
      .w2 = make_tensor_map<3>(a.w2_eDF.data, {{{F, 1, 64}, {D, F, kTileK}, {E, D * F, 1}}}),
      .tiles = {a.rows.offsets_e1.ptr<int32_t>(), static_cast<int32_t>(E), num_columns, kGroup},
      .dout = elements(a.dout_TD),
      .h = elements(a.h_R2F),
      .dh = elements(a.dh_R2F),
      .sa = elements(a.sa_RF),
      .weight = a.weight_R.ptr<float>(),
      .partial = static_cast<float*>(a.scratch.data),
      .token = index_of(a.rows),
      .R = R,
      .D = static_cast<int32_t>(D),
      .F = static_cast<int32_t>(F),
      .num_k = static_cast<int32_t>(div_ceil(D, kTileK)),
  };
  d_expert_down_kernel<<<op_state<State>(s).num_blocks, kThreads, sizeof(Shared), cuda_stream(s)>>>(p);
  check_launch("d_expert_down");
  add_dweight_partials(s, a, num_columns);
}

}  // namespace moebius::cuda::sm90
