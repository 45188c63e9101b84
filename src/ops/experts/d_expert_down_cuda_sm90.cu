// d_expert_down by wgmma: g = dout[token] W2[e] in tiles of 128 rows by 128 columns of F, and the backward of the gated
// activation on the tile while it is in registers.
//
// A block is a producer warpgroup and two consumer warpgroups that take tiles in turn: while one multiplies, the other
// is in its epilogue (ping-pong), so the tensor cores see one product after the other. A cluster is two blocks with the
// same columns and neighbouring rows; each loads half of a W2 tile for both.
//   producer   rows of dout by cp.async (128 gathered rows x 64 of D, zeros past the expert's end), W2 by TMA
//   consumer   128 x 128 sums, 128 registers a thread
// Shared memory: kStages of A and B; the h tile (gate and up), which the epilogue turns into dh in place; sa.
#include "core/cuda.h"
#include "ops/cuda/sm90.h"
#include "ops/cuda/sm90_tensor_map.h"
#include "ops/experts/experts_cuda.h"
#include "ops/experts/tiles_sm90.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kRows = 128, kCols = 128, kDepth = 64, kStages = 4, kThreads = 384, kMaxExperts = 512;
constexpr int kGroup = 8;  // clusters of rows that share a column of W2 tiles while it is in L2
constexpr uint32_t kTileBytes = 128 * 64 * 2, kStageBytes = 2 * kTileBytes, kPlaneBytes = kRows * kCols * 2;
constexpr uint32_t kHBytes = 2 * kPlaneBytes;

struct Shared {
  alignas(1024) unsigned char stage[kStages][kStageBytes];  // A: 128 rows of 64; B: 2 blocks of 64 (of D) x 64 (of F)
  alignas(1024) unsigned char plane[3][kPlaneBytes];        // gate, up, sa: 2 blocks of 128 rows x 64
  uint64_t full[kStages], empty[kStages], h_full[2];
  int32_t first_pair[kMaxExperts + 1];  // of expert e, counted in pairs of row tiles
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Params {
  const __nv_bfloat16* dout;
  const float* weight;
  float* partial;  // [column tiles, R]
  const int32_t *offsets, *token;
  __nv_bfloat16 *dh, *sa;
  int64_t R;
  int num_experts, D, F, num_col_tiles;
};

// What one block computes at a step of its cluster.
struct Tile {
  int expert, col;   // first column
  int64_t row, end;  // first row; the expert's end
  __device__ int num_rows() const { return static_cast<int>(max(int64_t{0}, min(int64_t{kRows}, end - row))); }
};

// Tile number t of the cluster's walk over pairs of row tiles and columns; experts only go up.
__device__ Tile tile_at(const Params& p, const int32_t* first_pair, int t, int& expert, uint32_t rank) {
  while (t >= first_pair[expert + 1] * p.num_col_tiles) ++expert;
  const int first = first_pair[expert];
  const GridStep step =
      grouped_step(t - first * p.num_col_tiles, first_pair[expert + 1] - first, p.num_col_tiles, kGroup);
  const int64_t begin = p.offsets[expert], end = p.offsets[expert + 1];
  return {expert, step.col * kCols, begin + (step.row * 2 + static_cast<int>(rank)) * static_cast<int64_t>(kRows), end};
}

struct Maps {
  CUtensorMap w2, h, dh, sa;
};

// The gathered rows of a thread: 16-byte column chunk threadIdx % 8 of rows threadIdx / 8 + 16 i. A row past the end
// reads row 0, and makes a row of g that is not stored.
struct GatheredRows {
  static constexpr int kPerThread = 8;
  uint32_t begins[kPerThread];  // in chunks
  __device__ GatheredRows(const Params& p, const Tile& tile) {
    const int num_rows = tile.num_rows();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int r = threadIdx.x / 8 + 16 * i;
      const int64_t row = r < num_rows ? tile.row + r : 0;
      begins[i] = r < num_rows ? static_cast<uint32_t>(p.token ? p.token[row] : row) * (p.D / 8) : 0;
    }
  }
  __device__ void copy(uint32_t to, const char* chunk_of_row_0, bool inside) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      cp_async_16(to + i * 16 * 128, chunk_of_row_0 + static_cast<uint64_t>(begins[i]) * 16, inside);
    }
  }
};

__device__ void produce(const Maps& maps, const Params& p, Shared& s, int num_tiles) {
  const uint32_t rank = cluster_block_rank();
  const int num_clusters = gridDim.x / 2, num_blocks = (p.D + kDepth - 1) / kDepth, chunk = threadIdx.x % 8;
  const uint32_t to_row = swizzle_128(threadIdx.x / 8, chunk);
  uint32_t slot = 0, parity = 1;
  int expert = 0;
  for (int t = blockIdx.x / 2; t < num_tiles; t += num_clusters) {
    const Tile tile = tile_at(p, s.first_pair, t, expert, rank);
    const GatheredRows rows(p, tile);
    const char* x = reinterpret_cast<const char*>(p.dout) + chunk * 16;
#pragma unroll 1
    for (int b = 0; b < num_blocks; ++b, x += kDepth * 2) {
      const uint32_t full = smem_addr(&s.full[slot]), to = smem_addr(s.stage[slot]);
      mbarrier_wait(smem_addr(&s.empty[slot]), parity);
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, kTileBytes);
        tma_load_multicast(to + kTileBytes + rank * (kTileBytes / 2), &maps.w2, full, 3, tile.col + 64 * rank,
                           b * kDepth, tile.expert);
      }
      const bool inside = b * kDepth + chunk * 8 < p.D;
      rows.copy(to + to_row, inside ? x : reinterpret_cast<const char*>(p.dout), inside);
      mbarrier_arrive_cp_async(full);
      if (++slot == kStages) slot = 0, parity ^= 1;
    }
  }
}

// 128 x 128 of h, gate and up.
__device__ void load_h(const Maps& maps, Shared& s, const Tile& tile, int consumer) {
  const uint32_t barrier = smem_addr(&s.h_full[consumer]);
  mbarrier_arrive_expect(barrier, kHBytes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      tma_load(smem_addr(s.plane[half]) + block * (kPlaneBytes / 2), &maps.h, barrier, tile.col + 64 * block, half,
               static_cast<int32_t>(tile.row));
    }
  }
}

__device__ void release(Shared& s, uint32_t slot) {
  if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(smem_addr(&s.empty[slot]), threadIdx.x % 32);
}

__device__ void multiply(Shared& s, float (&sum)[2][64], uint32_t count, int num_blocks) {
  for (int b = 0; b < num_blocks; ++b, ++count) {
    const uint32_t slot = count % kStages, base = smem_addr(s.stage[slot]);
    mbarrier_wait(smem_addr(&s.full[slot]), count / kStages & 1);
    fence_proxy_async();  // cp.async writes as ordinary stores do
    const uint64_t a = wgmma_operand<Major::k>(base), w = wgmma_operand<Major::mn>(base + kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Wgmma<Major::k, Major::mn>::multiply(sum[half], a + ((half * 8192 + k * 32) >> 4), w + (k * 2048 >> 4),
                                             b > 0 || k > 0);
      }
    }
    wgmma_commit();
    if (b > 0) {
      wgmma_wait<1>();
      release(s, (count - 1) % kStages);
    }
  }
}

__device__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ void store_word(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

struct Gradient {
  float dgate, dup, sa, product;
};
__device__ Gradient backward(float g, float gate, float up, float weight) {
  const float z = __fdividef(1.0f, 1.0f + __expf(-gate)), da = weight * g, silu = gate * z;
  const float a = __bfloat162float(__float2bfloat16_rn(silu * up));  // as expert_up rounded it
  return {da * up * (z + silu * (1.0f - z)), da * silu, weight * a, g * a};
}

// Turns the planes of h into dh and fills sa, for the row of this thread in one 64 x 128 half; gives its <g, a>.
__device__ float backward_row(uint32_t row_address, const float (&sum)[64], int i, float weight) {
  float product = 0;
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    const uint32_t at = row_address + j / 8 * (kPlaneBytes / 2) + (((j % 8) ^ (threadIdx.x / 4 & 7)) << 4);
    const uint32_t gate = load_word(at), up = load_word(at + kPlaneBytes);
    const Gradient lo = backward(sum[4 * j + 2 * i], low_bf16(gate), low_bf16(up), weight);
    const Gradient hi = backward(sum[4 * j + 2 * i + 1], high_bf16(gate), high_bf16(up), weight);
    store_word(at, pack_bf16(lo.dgate, hi.dgate));
    store_word(at + kPlaneBytes, pack_bf16(lo.dup, hi.dup));
    store_word(at + 2 * kPlaneBytes, pack_bf16(lo.sa, hi.sa));
    product += lo.product + hi.product;
  }
  return product;
}

// Rows of a tile that ends with its expert: those of the next one stay as they are.
__device__ void store_rows(const Params& p, Shared& s, const Tile& tile) {
  const int num_rows = tile.num_rows();
  for (int c = threadIdx.x % 128; c < 3 * kRows * (kCols / 8); c += 128) {
    const int plane = c / (kRows * 16), row = c / 16 % kRows, chunk = c % 16, col = tile.col + chunk * 8;
    if (row >= num_rows || col >= p.F) continue;
    const int64_t r = tile.row + row;
    __nv_bfloat16* to = plane == 2 ? p.sa + r * p.F + col : p.dh + (2 * r + plane) * p.F + col;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(s.plane[plane] + chunk / 8 * (kPlaneBytes / 2) + swizzle_128(row, chunk % 8));
  }
}

__device__ void store_tile(const Maps& maps, Shared& s, const Tile& tile) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int col = tile.col + 64 * block, row = static_cast<int>(tile.row);
    const uint32_t from = smem_addr(s.plane[0]) + block * (kPlaneBytes / 2);
    tma_store(&maps.dh, from, col, 0, row);
    tma_store(&maps.dh, from + kPlaneBytes, col, 1, row);
    tma_store(&maps.sa, from + 2 * kPlaneBytes, col, row);
  }
  tma_commit();
}

__device__ void epilogue(const Maps& maps, const Params& p, Shared& s, const Tile& tile, const float (&sum)[2][64],
                         int consumer) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, num_rows = tile.num_rows();
  float* partial = p.partial + tile.col / kCols * p.R + tile.row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 64 * half + 16 * warp + 8 * i + lane / 4;
      const float weight = row < num_rows ? p.weight[tile.row + row] : 0.0f;
      float product = backward_row(smem_addr(s.plane[0]) + row * 128 + lane % 4 * 4, sum[half], i, weight);
      product += __shfl_xor_sync(0xffffffffu, product, 1);
      product += __shfl_xor_sync(0xffffffffu, product, 2);
      if (lane % 4 == 0 && row < num_rows) partial[row] = product;
    }
  }
  fence_proxy_async();
  named_barrier_sync(3 + consumer, 128);
  if (num_rows == kRows) {
    if (threadIdx.x % 128 == 0) {
      store_tile(maps, s, tile);
      tma_wait_read<0>();
    }
  } else {
    store_rows(p, s, tile);
    fence_proxy_async();
    named_barrier_sync(3 + consumer, 128);
  }
}

__device__ void consume(const Maps& maps, const Params& p, Shared& s, int num_tiles, int consumer) {
  const uint32_t rank = cluster_block_rank();
  const int num_clusters = gridDim.x / 2, num_blocks = (p.D + kDepth - 1) / kDepth;
  const bool leader = threadIdx.x % 128 == 0;
  int expert = 0;
  uint32_t count = consumer * num_blocks, phase = 0;
  // Barrier 1 + c: it is consumer c's turn to multiply.
  if (consumer == 1) named_barrier_arrive(1, 256);
  int t = blockIdx.x / 2;
  if (consumer == 0 && leader && t < num_tiles) load_h(maps, s, tile_at(p, s.first_pair, t, expert, rank), 0);
  for (t += consumer * num_clusters; t < num_tiles; t += 2 * num_clusters) {
    const Tile tile = tile_at(p, s.first_pair, t, expert, rank);
    float sum[2][64];
    named_barrier_sync(1 + consumer, 256);
    multiply(s, sum, count, num_blocks);
    named_barrier_arrive(2 - consumer, 256);
    wgmma_wait<0>();
    hold_registers(sum[0]);
    hold_registers(sum[1]);
    release(s, (count + num_blocks - 1) % kStages);
    count += 2 * num_blocks;
    mbarrier_wait(smem_addr(&s.h_full[consumer]), phase);
    phase ^= 1;
    epilogue(maps, p, s, tile, sum, consumer);
    // The planes are free: the other consumer's h may come.
    if (leader && t + num_clusters < num_tiles) {
      int next = expert;
      load_h(maps, s, tile_at(p, s.first_pair, t + num_clusters, next, rank), consumer ^ 1);
    }
  }
  if (leader) tma_wait<0>();
}

__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    d_expert_down_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_addr(&s.full[i]), 128 + 1);  // each producer thread, and the bytes of W2
      mbarrier_init(smem_addr(&s.empty[i]), 2 * 4);   // the four warps that read it, in both blocks
    }
    for (uint64_t& barrier : s.h_full) mbarrier_init(smem_addr(&barrier), 1);
    fence_mbarrier_init();
  }
  if (threadIdx.x < 32) {
    scan_experts(s.first_pair, p.num_experts,
                 [&](int e) { return (p.offsets[e + 1] - p.offsets[e] + 2 * kRows - 1) / (2 * kRows); });
  }
  __syncthreads();
  cluster_sync();
  const int num_tiles = s.first_pair[p.num_experts] * p.num_col_tiles;
  if (threadIdx.x < 128) {
    fewer_registers<56>();
    produce(maps, p, s, num_tiles);
  } else {
    more_registers<224>();
    consume(maps, p, s, num_tiles, threadIdx.x / 128 - 1);
  }
  cluster_sync();  // neither block leaves while the other may still reach into it
}

struct State {
  int num_blocks;
  State() : num_blocks(persistent_blocks(reinterpret_cast<const void*>(d_expert_down_kernel), kSharedBytes)) {}
  static constexpr int kSharedBytes = sizeof(Shared);
};

}  // namespace

bool takes(const DExpertDown& a) {
  return a.dout_TD.dtype == DType::bf16 && a.w2_eDF.dim(0) <= kMaxExperts && a.sa_RF.dim(0) < INT32_MAX - kRows &&
         a.dout_TD.numel() / 8 < INT32_MAX && rows_are_aligned({a.dout_TD, a.sa_RF}) &&
         aligned_16({a.w2_eDF, a.h_R2F, a.dh_R2F});
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.dim(1), E = a.w2_eDF.dim(0);
  const auto planes = [&](const Tensor& h) {
    return make_tensor_map<3>(h.data, {{{F, 1, 64}, {2, F, 1}, {R, 2 * F, kRows}}});
  };
  const Maps maps{make_tensor_map<3>(a.w2_eDF.data, {{{F, 1, 64}, {D, F, kDepth}, {E, D * F, 1}}}), planes(a.h_R2F),
                  planes(a.dh_R2F), make_tensor_map<2>(a.sa_RF.data, {{{F, 1, 64}, {R, F, kRows}}})};
  const Params p{.dout = static_cast<const __nv_bfloat16*>(a.dout_TD.data),
                 .weight = a.weight_R.ptr<float>(),
                 .partial = static_cast<float*>(a.scratch.data),
                 .offsets = a.rows.offsets_e1.ptr<int32_t>(),
                 .token = index_of(a.rows),
                 .dh = static_cast<__nv_bfloat16*>(a.dh_R2F.data),
                 .sa = static_cast<__nv_bfloat16*>(a.sa_RF.data),
                 .R = R,
                 .num_experts = static_cast<int>(E),
                 .D = static_cast<int>(D),
                 .F = static_cast<int>(F),
                 .num_col_tiles = static_cast<int>(div_ceil(F, kCols))};
  d_expert_down_kernel<<<op_state<State>(s).num_blocks, kThreads, State::kSharedBytes, cuda_stream(s)>>>(maps, p);
  check_launch("d_expert_down");
  add_dweight_partials(s, a, p.num_col_tiles);
}

}  // namespace moebius::cuda::sm90
