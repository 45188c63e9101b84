// expert_wgrad by wgmma: k runs over the rows of an expert, so both operands stand across (MN-major).
//
// One side is gathered row by row (dout for dw2, x for dw1), the other stands as it is and comes by TMA. A tile is 128
// columns of the gathered side by 256 of the other, whichever of them is left; a cluster is two blocks with the same
// 256 and neighbouring 128s, each loads half of the 256 for both.
//   producer   a warpgroup: the gathered side by cp.async, the other by TMA; the last rows of an expert, fewer than 64,
//              by cp.async on both sides, with zeros after them (what lies there may be NaN)
//   consumers  two warpgroups of 64 x 256 sums, 128 registers a thread
// The tile is added to dw by reductions at L2: one block owns each element, so one f32 addition is made to it. Experts
// go by falling row count, which evens out what the blocks get.
#include "core/cuda.h"
#include "ops/cuda/sm90.h"
#include "ops/cuda/sm90_tensor_map.h"
#include "ops/experts/experts_cuda.h"
#include "ops/experts/tiles_sm90.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kGatherCols = 128, kPlainCols = 256, kDepth = 64, kStages = 4, kThreads = 384, kMaxExperts = 512;
constexpr int kGroup = 4;  // clusters along the gathered side that share columns of the other while they are in L2
constexpr uint32_t kBlockBytes = 64 * kDepth * 2;  // 64 rows x 64 columns
constexpr uint32_t kGatherBytes = kGatherCols / 64 * kBlockBytes, kPlainBytes = kPlainCols / 64 * kBlockBytes;

struct Shared {
  alignas(1024) unsigned char stage[kStages][kGatherBytes + kPlainBytes];
  uint64_t full[kStages], empty[kStages];
  int32_t order[kMaxExperts];  // experts by falling row count
  int32_t num_active;          // those with rows
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Side {
  const __nv_bfloat16* x;
  const int32_t* index;  // null: row r is row r
  int width;
};
struct Params {
  float* dw;
  Side gathered, plain;
  const int32_t* offsets;
  int num_experts, gather_steps, plain_steps;  // clusters along each side
  int64_t gather_stride, plain_stride;         // of dw, from a column of that side to the next
  int64_t expert_stride;
};

struct Tile {
  int expert, gather_col, plain_col;
  int begin, end;
};

__device__ Tile tile_at(const Params& p, const Shared& s, int t, uint32_t rank) {
  const int per_expert = p.gather_steps * p.plain_steps, expert = s.order[t / per_expert];
  const GridStep step = grouped_step(t % per_expert, p.gather_steps, p.plain_steps, kGroup);
  return {expert, (2 * step.row + static_cast<int>(rank)) * kGatherCols, step.col * kPlainCols, p.offsets[expert],
          p.offsets[expert + 1]};
}

// The gathered side: thread t copies the 16-byte chunk t % 16 of rows t / 16 + 8 i, so that its places in shared memory
// are 1024 bytes apart. A lane reads one index, of row i = lane % 8 of the half warp lane / 8 % 2.
struct GatheredColumns {
  static constexpr int kPerThread = 8;
  const char* x;    // this thread's chunk of row 0
  uint32_t place;   // of its first row in the tile
  uint32_t chunks;  // in a row
  bool inside;
  __device__ GatheredColumns(const Side& side, int col) : chunks(side.width / 8) {
    const int chunk = threadIdx.x % 16;
    inside = col + chunk * 8 < side.width;
    x = reinterpret_cast<const char*>(side.x + (inside ? col + chunk * 8 : 0));
    place = chunk / 8 * kBlockBytes + swizzle_128(threadIdx.x / 16, chunk % 8);
  }
  // Where this lane's row of the 64 from `row` on begins, in chunks.
  __device__ uint32_t read_index(const Side& side, int row, int end) const {
    const int r = row + static_cast<int>(threadIdx.x / 32 * 2 + threadIdx.x / 8 % 2 + threadIdx.x % 8 * 8);
    return r >= end ? 0 : static_cast<uint32_t>(side.index ? side.index[r] : r) * chunks;
  }
  template <bool kWhole>
  __device__ void copy(uint32_t to, uint32_t begins, int row, int end) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t from = __shfl_sync(0xffffffffu, begins, i + threadIdx.x / 16 % 2 * 8);
      const bool valid = inside && (kWhole || row + static_cast<int>(threadIdx.x / 16) + 8 * i < end);
      cp_async_16(to + place + i * 1024, x + static_cast<uint64_t>(from) * 16, valid);
    }
  }
};

// The last rows of an expert, of the plain side: thread t copies chunk t % 32 of rows t / 32 + 4 i.
__device__ void copy_last_rows(uint32_t to, const Side& side, int col, int row, int end) {
  const int chunk = threadIdx.x % 32, first = threadIdx.x / 32;
  const bool inside = col + chunk * 8 < side.width;
  const __nv_bfloat16* x = side.x + static_cast<int64_t>(row + first) * side.width + (inside ? col + chunk * 8 : 0);
  const uint32_t place = to + chunk / 8 * kBlockBytes + swizzle_128(first, chunk % 8);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const bool valid = inside && row + first + 4 * i < end;
    // Rows 4 apart differ in one bit of the swizzle.
    cp_async_16((place ^ (i % 2 * 64)) + i * 512, valid ? x : side.x, valid);
    x += 4 * side.width;
  }
}

template <bool kGather>
__device__ void load_whole(const CUtensorMap& gathered, const CUtensorMap& plain, const Tile& tile, uint32_t to,
                           uint32_t full, int row, uint32_t rank) {
  mbarrier_arrive_expect(full, kPlainBytes + (kGather ? 0 : kGatherBytes));
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int at = 2 * rank + block;
    tma_load_multicast(to + kGatherBytes + at * kBlockBytes, &plain, full, 3, tile.plain_col + 64 * at, row);
    if (!kGather) tma_load(to + block * kBlockBytes, &gathered, full, tile.gather_col + 64 * block, row);
  }
}

template <bool kGather>
__device__ void produce(const CUtensorMap& gathered, const CUtensorMap& plain, const Params& p, Shared& s) {
  const uint32_t rank = cluster_block_rank();
  const int num_clusters = gridDim.x / 2, num_tiles = s.num_active * p.gather_steps * p.plain_steps;
  uint32_t slot = 0, parity = 1;
  for (int t = blockIdx.x / 2; t < num_tiles; t += num_clusters) {
    const Tile tile = tile_at(p, s, t, rank);
    const GatheredColumns columns(p.gathered, tile.gather_col);
    uint32_t begins = columns.read_index(p.gathered, tile.begin, tile.end);
#pragma unroll 1
    for (int row = tile.begin; row < tile.end; row += kDepth) {
      const uint32_t full = smem_addr(&s.full[slot]), to = smem_addr(s.stage[slot]);
      const uint32_t next = columns.read_index(p.gathered, row + kDepth, tile.end);
      mbarrier_wait(smem_addr(&s.empty[slot]), parity);
      if (row + kDepth <= tile.end) {
        if (threadIdx.x == 0) load_whole<kGather>(gathered, plain, tile, to, full, row, rank);
        __syncwarp();
        if (kGather) columns.copy<true>(to, begins, row, tile.end);
      } else {
        if (threadIdx.x == 0) mbarrier_arrive(full);
        __syncwarp();
        columns.copy<false>(to, begins, row, tile.end);
        copy_last_rows(to + kGatherBytes, p.plain, tile.plain_col, row, tile.end);
      }
      mbarrier_arrive_cp_async(full);
      begins = next;
      if (++slot == kStages) slot = 0, parity ^= 1;
    }
  }
}

__device__ void release(Shared& s, uint32_t slot) {
  if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(smem_addr(&s.empty[slot]), threadIdx.x % 32);
}

// The 64 x 256 sums of this warpgroup; count numbers the blocks of rows.
__device__ void multiply(Shared& s, float (&sum)[128], uint32_t& count, int num_blocks, int consumer) {
  for (int b = 0; b < num_blocks; ++b, ++count) {
    const uint32_t slot = count % kStages, base = smem_addr(s.stage[slot]);
    mbarrier_wait(smem_addr(&s.full[slot]), count / kStages & 1);
    fence_proxy_async();  // cp.async writes as ordinary stores do
    const uint64_t a = wgmma_operand<Major::mn>(base + consumer * kBlockBytes);
    const uint64_t w = wgmma_operand<Major::mn>(base + kGatherBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<Major::mn, Major::mn>::multiply(sum, a + (k * 2048 >> 4), w + (k * 2048 >> 4), b > 0 || k > 0);
    }
    wgmma_commit();
    if (b > 0) {
      wgmma_wait<1>();
      release(s, (count - 1) % kStages);
    }
  }
  wgmma_wait<0>();
  hold_registers(sum);
  release(s, (count - 1) % kStages);
}

__device__ void add_pair(float* to, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// dw[gathered column][plain column] += sum: pairs lie along the plain side.
__device__ void add_along_plain(const Params& p, const Tile& tile, const float (&sum)[128], int consumer) {
  const int lane = threadIdx.x % 32, g = tile.gather_col + 64 * consumer + threadIdx.x / 32 % 4 * 16 + lane / 4;
  float* dw = p.dw + tile.expert * p.expert_stride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (g + 8 * i >= p.gathered.width) continue;
    float* row = dw + (g + 8 * i) * p.gather_stride;
#pragma unroll
    for (int j = 0; j < kPlainCols / 8; ++j) {
      const int col = tile.plain_col + 8 * j + 2 * (lane % 4);
      if (col < p.plain.width) add_pair(row + col, sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
    }
  }
}

// dw[plain column][gathered column] += sum: lanes 4 apart hold neighbours of the gathered side and trade halves.
__device__ void add_along_gathered(const Params& p, const Tile& tile, const float (&sum)[128], int consumer) {
  const int lane = threadIdx.x % 32, odd = lane / 4 % 2;
  const int g = tile.gather_col + 64 * consumer + threadIdx.x / 32 % 4 * 16 + (lane / 4 & ~1);
  float* dw = p.dw + tile.expert * p.expert_stride;
#pragma unroll
  for (int j = 0; j < kPlainCols / 8; ++j) {
    const int col = tile.plain_col + 8 * j + 2 * (lane % 4) + odd;
    float* row = dw + col * p.plain_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float lo = sum[4 * j + 2 * i], hi = sum[4 * j + 2 * i + 1];
      const float other = __shfl_xor_sync(0xffffffffu, odd ? lo : hi, 4);
      if (col < p.plain.width && g + 8 * i < p.gathered.width) {
        add_pair(row + g + 8 * i, odd ? other : lo, odd ? hi : other);
      }
    }
  }
}

template <bool kGatheredIsLeft>
__device__ void consume(const Params& p, Shared& s, int consumer) {
  const uint32_t rank = cluster_block_rank();
  const int num_clusters = gridDim.x / 2, num_tiles = s.num_active * p.gather_steps * p.plain_steps;
  uint32_t count = 0;
  for (int t = blockIdx.x / 2; t < num_tiles; t += num_clusters) {
    const Tile tile = tile_at(p, s, t, rank);
    float sum[128];
    multiply(s, sum, count, (tile.end - tile.begin + kDepth - 1) / kDepth, consumer);
    kGatheredIsLeft ? add_along_plain(p, tile, sum, consumer) : add_along_gathered(p, tile, sum, consumer);
  }
}

// order[0, num_active): the experts with rows, most rows first.
__device__ void order_experts(const Params& p, Shared& s) {
  int num_active = 0;
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
    const int rows = p.offsets[e + 1] - p.offsets[e];
    int place = 0;
    for (int other = 0; other < p.num_experts; ++other) {
      const int others = p.offsets[other + 1] - p.offsets[other];
      place += others > rows || (others == rows && other < e);
    }
    s.order[place] = e;
    num_active += rows > 0;
  }
  if (threadIdx.x == 0) s.num_active = 0;
  __syncthreads();
  if (num_active > 0) atomicAdd(&s.num_active, num_active);
}

template <bool kGather, bool kGatheredIsLeft>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    expert_wgrad_kernel(const __grid_constant__ CUtensorMap gathered, const __grid_constant__ CUtensorMap plain,
                        const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_addr(&s.full[i]), 128 + 1);     // each producer thread, and the bytes of TMA
      mbarrier_init(smem_addr(&s.empty[i]), 2 * 2 * 4);  // the warps that read it, in both blocks
    }
    fence_mbarrier_init();
  }
  order_experts(p, s);
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    produce<kGather>(gathered, plain, p, s);
  } else {
    more_registers<232>();
    consume<kGatheredIsLeft>(p, s, threadIdx.x / 128 - 1);
  }
  cluster_sync();  // neither block leaves while the other may still reach into it
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, Params);

struct State {
  int num_blocks = 0;
  State() {
    for (const Kernel kernel :
         {expert_wgrad_kernel<true, true>, expert_wgrad_kernel<true, false>, expert_wgrad_kernel<false, true>}) {
      num_blocks = persistent_blocks(reinterpret_cast<const void*>(kernel), sizeof(Shared));
    }
  }
};

CUtensorMap map_of(const Tensor& x) {
  return make_tensor_map<2>(x.data, {{{x.dim(1), 1, 64}, {x.dim(0), x.dim(1), kDepth}}});
}

}  // namespace

bool takes(const ExpertWgrad& a) {
  const bool one_side = !(a.gather_left && a.gather_right) || a.rows.token_R.empty();
  const int64_t rows = a.left_RM.dim(0) + a.right_RN.dim(0);
  const bool countable =
      rows < INT32_MAX / 2 && a.left_RM.numel() / 8 < INT32_MAX && a.right_RN.numel() / 8 < INT32_MAX;
  return a.left_RM.dtype == DType::bf16 && one_side && rows > 0 && countable && a.dw_eMN.dim(0) <= kMaxExperts &&
         rows_are_aligned({a.left_RM, a.right_RN}) && aligned_16({a.dw_eMN});
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  const int32_t* index = index_of(a.rows);
  const bool left_first = !(a.gather_right && index);  // the left side is the one taken as gathered
  const bool gather = (a.gather_left || a.gather_right) && index;
  const Tensor& gathered = left_first ? a.left_RM : a.right_RN;
  const Tensor& plain = left_first ? a.right_RN : a.left_RM;
  const auto side = [](const Tensor& x, const int32_t* rows) {
    return Side{static_cast<const __nv_bfloat16*>(x.data), rows, static_cast<int>(x.dim(1))};
  };
  const int64_t N = a.dw_eMN.dim(2);
  const Params p{.dw = a.dw_eMN.ptr<float>(),
                 .gathered = side(gathered, gather ? index : nullptr),
                 .plain = side(plain, nullptr),
                 .offsets = a.rows.offsets_e1.ptr<int32_t>(),
                 .num_experts = static_cast<int>(a.dw_eMN.dim(0)),
                 .gather_steps = static_cast<int>(div_ceil(gathered.dim(1), 2 * kGatherCols)),
                 .plain_steps = static_cast<int>(div_ceil(plain.dim(1), kPlainCols)),
                 .gather_stride = left_first ? N : 1,
                 .plain_stride = left_first ? 1 : N,
                 .expert_stride = a.dw_eMN.dim(1) * N};
  const Kernel kernel = !gather      ? expert_wgrad_kernel<false, true>
                        : left_first ? expert_wgrad_kernel<true, true>
                                     : expert_wgrad_kernel<true, false>;
  kernel<<<op_state<State>(s).num_blocks, kThreads, sizeof(Shared), cuda_stream(s)>>>(map_of(gathered), map_of(plain),
                                                                                      p);
  check_launch("expert_wgrad");
}

}  // namespace moebius::cuda::sm90
