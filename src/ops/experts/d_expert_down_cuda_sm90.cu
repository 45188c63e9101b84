// d_expert_down for sm_90a: g = dout[token] W2[e] as a grouped product with W2 across (MN-major), and the backward of
// the gated activation on g, rounded, piece by piece under the products of the next tile.
//
// A piece is 16 rows by 32 columns of a consumer warp. g goes through the warp's staging, so that a lane has 8 columns
// of a row and all of h, dh and sa is read and written in 16 bytes; h is on its way there since the piece before, each
// lane's in a place of its own.
#include "core/cuda.h"
#include "ops/cuda/swiglu.h"
#include "ops/experts/experts_cuda.h"
#include "ops/experts/grouped_kernel_cuda_sm90.h"
#include "ops/experts/grouped_launch_cuda_sm90.h"

namespace moebius::cuda {
namespace {

constexpr int kPieceCols = 32;
// In a warp's staging: g of a piece, gate and up of the next one, and what lanes keep of their rows.
constexpr uint32_t kPieceBytes = 16 * kPieceCols * 2, kGateStaging = kPieceBytes, kUpStaging = 2 * kPieceBytes,
                   kRowStaging = 3 * kPieceBytes;
static_assert(kRowStaging + 2 * 32 * 8 <= kStagingBytesWarp);

// 16-byte chunk of a row of a piece; the rows of 8x8 matrices are in different banks.
__device__ __forceinline__ uint32_t place_of_g(uint32_t row, uint32_t chunk) {
  return row * (kPieceCols * 2) + ((chunk ^ (row / 2 & 3)) << 4);
}

__device__ __forceinline__ void load_shared(uint32_t (&words)[2], uint32_t from) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

// What a lane makes of 8 columns of a row.
struct RowPart {
  uint32_t dgate[4], dup[4], sa[4];
};

// What a lane keeps of a row from piece to piece, in the staging: registers are few.
struct RowSum {
  float weight, product;  // product: <g, a> of the columns so far
  __device__ __forceinline__ static uint32_t place(uint32_t staging, int i) {
    return staging + kRowStaging + i * 256 + threadIdx.x % 32 * 8;
  }
  __device__ __forceinline__ static RowSum load(uint32_t staging, int i) {
    uint32_t words[2];
    load_shared(words, place(staging, i));
    return {__uint_as_float(words[0]), __uint_as_float(words[1])};
  }
  __device__ __forceinline__ void store(uint32_t staging, int i) const {
    store_shared(place(staging, i), __float_as_uint(weight), __float_as_uint(product));
  }
};

template <bool kGatherRows, bool kWeighted>
struct DDownGemm {
  static constexpr bool kGather = kGatherRows;
  static constexpr Major kMajorB = Major::mn;

  struct Params {
    CUtensorMap a, b;
    Gather gather;
    RowTiles tiles;
    int32_t num_k;
    const uint16_t* h;
    uint16_t *dh, *sa;
    const float* weight;
    float* partial;  // [column tiles, R]
    int64_t R;
    int32_t F;
  };

  __device__ static void load_b(const Params& p, const SlotLoad& load, uint32_t half, int32_t k, int32_t tile_n,
                                int32_t expert) {
    const int32_t n = tile_n * kTileN + static_cast<int32_t>(half) * 128;
    load.box(&p.b, half * kHalfBytesB, n, k * kTileK, expert);
    load.box(&p.b, half * kHalfBytesB + kHalfBytesB / 2, n + 64, k * kTileK, expert);
  }

  using Held = HeldRows;
  static constexpr int kTurnsAhead = 1, kPieces = kTileN / kPieceCols;

  // A lane has rows lane / 4 and 8 more.
  __device__ __forceinline__ static int32_t lane_row(int i) {
    return static_cast<int32_t>(threadIdx.x % 32 / 4) + 8 * i;
  }
  __device__ __forceinline__ static int32_t lane_col(const Held& held, int piece) {
    return held.n * kTileN + piece * kPieceCols + static_cast<int32_t>(threadIdx.x % 4) * 8;
  }

  __device__ __forceinline__ static void begin(const Params& p, Held& held, uint32_t staging) {
    if constexpr (kWeighted) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        RowSum{lane_row(i) < held.rows ? __ldg(p.weight + held.row + lane_row(i)) : 0.0f, 0}.store(staging, i);
      }
    }
    fetch_h(p, held, staging, 0);
  }

  // Starts to copy this lane's parts of h to its places.
  __device__ __forceinline__ static void fetch_h(const Params& p, const Held& held, uint32_t staging, int piece) {
    const uint32_t to = staging + threadIdx.x % 32 * 16;
    const int32_t col = lane_col(held, piece);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = lane_row(i) < held.rows && col < p.F;
      const uint16_t* gate = there ? p.h + static_cast<int64_t>(held.row + lane_row(i)) * 2 * p.F + col : p.h;
      cp_async_16(to + kGateStaging + i * 512, gate, there);
      cp_async_16(to + kUpStaging + i * 512, there ? gate + p.F : gate, there);
    }
    cp_async_commit();
  }

  // A piece's g from registers to rows.
  template <int kFirst>
  __device__ __forceinline__ static void stage_g(const Held& held, uint32_t staging) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t j = 0; j < kPieceCols / 16; ++j) {
      const uint32_t* words = held.words + kFirst + 4 * j;
      stmatrix_4(staging + place_of_g(lane % 16, 2 * j + lane / 16), words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
  }

  // Four columns at a time.
  __device__ __forceinline__ static RowPart backward(uint32_t staging, int i) {
    const uint32_t lane = threadIdx.x % 32, h = staging + lane * 16 + i * 512;
    const uint32_t from = staging + place_of_g(static_cast<uint32_t>(lane_row(i)), lane % 4);
    RowPart part;
    RowSum row;
    if constexpr (kWeighted) row = RowSum::load(staging, i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t g[2], gate[2], up[2];
      load_shared(gate, h + kGateStaging + half * 8);
      load_shared(g, from + half * 8);
      load_shared(up, h + kUpStaging + half * 8);
      float z[4] = {low_bf16(gate[0]), high_bf16(gate[0]), low_bf16(gate[1]), high_bf16(gate[1])};
      approximate_sigmoids(z);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float g0 = low_bf16(g[j]), g1 = high_bf16(g[j]);
        const float gate0 = low_bf16(gate[j]), gate1 = high_bf16(gate[j]), up0 = low_bf16(up[j]),
                    up1 = high_bf16(up[j]);
        const float da0 = kWeighted ? __fmul_rn(row.weight, g0) : g0;
        const float da1 = kWeighted ? __fmul_rn(row.weight, g1) : g1;
        const SwigluGradient lo = swiglu_gradient(da0, gate0, z[2 * j], up0),
                             hi = swiglu_gradient(da1, gate1, z[2 * j + 1], up1);
        part.dgate[2 * half + j] = pack_bf16(lo.dgate, hi.dgate);
        part.dup[2 * half + j] = pack_bf16(lo.dup, hi.dup);
        uint32_t a = pack_bf16(swiglu(gate0, z[2 * j], up0), swiglu(gate1, z[2 * j + 1], up1));  // as expert_up's
        if constexpr (kWeighted) {
          row.product = fmaf(g1, high_bf16(a), fmaf(g0, low_bf16(a), row.product));
          a = pack_bf16(row.weight * low_bf16(a), row.weight * high_bf16(a));
        }
        part.sa[2 * half + j] = a;
      }
    }
    if constexpr (kWeighted) row.store(staging, i);
    return part;
  }

  __device__ __forceinline__ static void store_16(uint16_t* to, const uint32_t (&words)[4]) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  }

  template <int kPiece>
  __device__ __forceinline__ static void store_piece(const Params& p, Held& held, uint32_t staging) {
    if (held.n * kTileN + kPiece * kPieceCols < p.F) {
      stage_g<8 * kPiece>(held, staging);
      cp_async_wait<0>();
      const int32_t col = lane_col(held, kPiece);
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const RowPart part = backward(staging, i);
        if (lane_row(i) >= held.rows || col >= p.F) continue;
        const int64_t row = held.row + lane_row(i);
        store_16(p.dh + row * 2 * p.F + col, part.dgate);
        store_16(p.dh + row * 2 * p.F + p.F + col, part.dup);
        store_16(p.sa + row * p.F + col, part.sa);
      }
      __syncwarp();  // the next piece writes where others read g
      if constexpr (kPiece + 1 < kPieces) fetch_h(p, held, staging, kPiece + 1);
    }
    if constexpr (kWeighted && kPiece + 1 == kPieces) store_products(p, held, staging);
  }

  __device__ __forceinline__ static void store_products(const Params& p, const Held& held, uint32_t staging) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = RowSum::load(staging, i).product;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0 && lane_row(i) < held.rows) {
        p.partial[held.n * p.R + held.row + lane_row(i)] = sum;
      }
    }
  }
};

template <bool kGatherRows, bool kWeighted>
void launch(Stream& s, const DExpertDown& a) {
  using Op = DDownGemm<kGatherRows, kWeighted>;
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.dim(1), E = a.w2_eDF.dim(0);
  typename Op::Params p{};
  p.a = rows_map(a.dout_TD);
  p.b = make_tensor_map<3>(a.w2_eDF.data, {{{F, 1, 64}, {D, F, kTileK}, {E, D * F, 1}}});
  p.gather = {static_cast<const char*>(a.dout_TD.data), index_of(a.rows), static_cast<int32_t>(D / 8)};
  p.tiles = row_tiles(a.rows, R, div_ceil(F, kTileN));
  p.num_k = static_cast<int32_t>(div_ceil(D, kTileK));
  p.h = static_cast<const uint16_t*>(a.h_R2F.data);
  p.dh = static_cast<uint16_t*>(a.dh_R2F.data);
  p.sa = static_cast<uint16_t*>(a.sa_RF.data);
  p.R = R;
  p.F = static_cast<int32_t>(F);
  if constexpr (kWeighted) {
    p.weight = a.weight_R.ptr<float>();
    p.partial = static_cast<float*>(a.scratch.data);
  }
  launch_grouped<Op>(s, p, "d_expert_down");
  if constexpr (kWeighted) add_dweight_partials(s, a, div_ceil(F, kTileN));
}

}  // namespace

bool sm90::takes(const DExpertDown& a) {
  return takes_rows(a.dout_TD) && takes_rows(a.w2_eDF) && takes_rows(a.sa_RF) && takes_rows(a.h_R2F) &&
         takes_rows(a.dh_R2F) && takes_num_rows(a.sa_RF);
}

void sm90::d_expert_down(Stream& s, const DExpertDown& a) {
  const bool gathers = !a.rows.token_R.empty(), weighted = !a.weight_R.empty();
  MOEBIUS_ASSERT(weighted || !gathers);
  if (!weighted) return launch<false, false>(s, a);
  gathers ? launch<true, true>(s, a) : launch<false, true>(s, a);
}

}  // namespace moebius::cuda
