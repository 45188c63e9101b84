// dq, dk and dv of bf16 with heads of 128 on sm_90a, in one kernel with five products.
//
// A block is 128 keys of one kv head of one sequence. Keys run along the rows of its scores, 64 for
// each of two warpgroups. It walks tiles of 64 queries from the last one to that of its own keys, and
// dk and dv stay in registers. For dq each warpgroup multiplies the ds of both with 64 columns of the
// keys. It does so one step later, so that neither waits for the other's ds.
//
// The copy engine adds dq to f32 sums in memory. For each tile a counter says how many blocks of
// keys were added, and a block waits until all earlier ones were. The blocks of a kv group walk the
// same tiles in one direction, so a block that begins together with the one before it follows it at
// a distance of one step, and finds the tiles in L2.
//
// A block takes a ticket when it begins, which says its keys. It waits only for blocks with lower
// tickets, which have begun. So some block can always go on, whatever else the GPU runs.
#include <algorithm>

#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

constexpr int kConsumers = 2 * kGroupThreads;
constexpr int kWidth = 128, kTileRows = 64, kBlockKeys = 128, kStages = 2, kDqStages = 2;
// A warpgroup's half of a tile's dq, in the order of its threads: a float4 of all threads, then the next.
constexpr int kHalfFloats = kTileRows * kWidth / 2, kHalfBytes = kHalfFloats * 4;

using Keys = Sm90Tile<kBlockKeys, kWidth>;
using Queries = Sm90Tile<kTileRows, kWidth>;

struct Columns {  // of the queries of a stage
  float lse2[kTileRows], delta[kTileRows];
  int first[kTileRows];
};

struct Shared {
  unsigned char k[Keys::kBytes], v[Keys::kBytes];
  unsigned char q[kStages][Queries::kBytes], dout[kStages][Queries::kBytes];
  unsigned char ds[2][2][kDsTileBytes];        // of even and odd steps, and of a warpgroup's keys
  unsigned char dq[2][kDqStages][kHalfBytes];  // of a warpgroup, on its way to memory
  Columns columns[kStages];
  uint64_t keys_full, full[kStages], empty[kStages], ds_full[2], ds_empty[2];
  uint64_t dq_full[2][kDqStages], dq_empty[2][kDqStages];
  int ticket, end_tile;
};

// The blocks of a slice share these. A kv group is a kv head of a sequence with its query heads.
struct FusedSlice {
  float* dq;              // f32 sums, [groups, heads of a group, tiles, 2, kHalfFloats]
  int* added;             // [groups, heads of a group, tiles, 2]: blocks of keys that were added
  int* tickets;           // blocks that have begun
  int first, groups;      // group b kv_heads + g is kv head g of sequence b
  int wave;               // groups whose blocks begin in turn
  int key_blocks, tiles;  // of a group
  bool heads_outer;       // of a walk: for windows, whose blocks are of one length and walk different tiles
};

struct FusedWork {
  int b, kv_head;
  int group;  // in the slice
  int block, key;
};

// Earlier keys are seen by more queries: the longest blocks of a wave begin first.
__device__ __forceinline__ FusedWork work_of_ticket(const FusedSlice& f, const AttentionSizes& z, int ticket) {
  const int blocks = f.wave * f.key_blocks, wave = ticket / blocks, at = ticket % blocks,
            groups = min(f.wave, f.groups - wave * f.wave);
  FusedWork w;
  w.group = wave * f.wave + at % groups;
  w.block = at / groups;
  w.key = w.block * kBlockKeys;
  w.b = (f.first + w.group) / z.kv_heads;
  w.kv_head = (f.first + w.group) % z.kv_heads;
  return w;
}

// The first tile with a query that sees the key, if no document or window hides it.
__device__ __forceinline__ int64_t first_tile(const AttentionSizes& z, int key) {
  return (key > z.shift ? key - z.shift : 0) / kTileRows;
}

// Tiles [begin, end) from the last one on: all heads of the group for a tile, or all tiles of a head.
struct FusedWalk {
  int begin, end, heads;
  bool heads_outer;
  int tile = end - 1, head = 0;
  __device__ __forceinline__ int steps() const { return (end - begin) * heads; }
  __device__ __forceinline__ void next() {
    if (!heads_outer) {
      if (++head == heads) head = 0, --tile;
    } else if (--tile < begin) {
      tile = end - 1, ++head;
    }
  }
};

// The columns of a stage pass between warps as those of attention_dkv.cu do.
__device__ void load_queries(Shared& shared, const BwdMaps& maps, const RowSums& sums, const AttentionSizes& z,
                             const FusedWork& w, FusedWalk walk) {
  const int lane = threadIdx.x % 32;
  if (walk.steps() == 0) return;
  if (lane == 0) {
    const uint32_t full = smem_addr(&shared.keys_full);
    mbarrier_arrive_expect(full, 2 * Keys::kBytes);
    Keys::load(smem_addr(shared.k), &maps.k, full, w.kv_head, w.key, w.b);
    Keys::load(smem_addr(shared.v), &maps.v, full, w.kv_head, w.key, w.b);
  }
  Ring<kStages> ring;
  for (int step = 0; step < walk.steps(); ++step, ring.advance(), walk.next()) {
    const int h = w.kv_head * walk.heads + walk.head, row = walk.tile * kTileRows;
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    if (lane == 0) {
      mbarrier_arrive_expect(full, 2 * Queries::kBytes);
      Queries::load(smem_addr(shared.q[ring.stage]), &maps.q, full, h, row, w.b);
      Queries::load(smem_addr(shared.dout[ring.stage]), &maps.dout, full, h, row, w.b);
    }
    Columns& columns = shared.columns[ring.stage];
    const int64_t at = (int64_t{w.b} * z.heads + h) * z.rows;
#pragma unroll
    for (int i = lane; i < kTileRows; i += 32) {
      const int r = row + i;
      const bool exists = r < z.rows;
      columns.lse2[i] = exists ? sums.lse2[at + r] : 0.0f;
      columns.delta[i] = exists ? sums.delta[at + r] : 0.0f;
      columns.first[i] = exists ? static_cast<int>(first_key(z, w.b, r)) : 0x7fffffff;
    }
    mbarrier_arrive(full);
  }
}

__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* to, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// One thread adds the dq of a warpgroup's 64 columns. The fences order what the copy engine does against the accesses
// to counters, which are ordinary ones.
__device__ void add_dq(Shared& shared, const FusedSlice& f, const AttentionSizes& z, const FusedWork& w, FusedWalk walk,
                       int half) {
  Ring<kDqStages> ring;
  const int first_head = w.group * walk.heads;
  int before = 0;
  for (int step = 0; step < walk.steps(); ++step, ring.advance(), walk.next()) {
    if (walk.head == 0 || walk.heads_outer)
      before = w.block - static_cast<int>(first_key(z, w.b, walk.tile * kTileRows)) / kBlockKeys;
    const int at = ((first_head + walk.head) * f.tiles + walk.tile) * 2 + half;
    int* const added = f.added + at;
    if (before > 0) {
      while (load_acquire(added) < before) {
      }
    }
    mbarrier_wait(smem_addr(&shared.dq_full[half][ring.stage]), ring.parity);
    fence_proxy_async_global();
    const uint32_t from = smem_addr(shared.dq[half][ring.stage]);
    float* const to = f.dq + int64_t{at} * kHalfFloats;
    if (before > 0)
      bulk_add(to, from, kHalfBytes);
    else
      bulk_store(to, from, kHalfBytes);
    tma_commit();
    tma_wait_read<0>();
    mbarrier_arrive(smem_addr(&shared.dq_empty[half][ring.stage]));
    tma_wait<0>();
    fence_proxy_async_global();
    store_release(added, before + 1);
  }
}

// Clears the probabilities of keys from `end` on, which are zeros in shared memory. Queries of a part may come after
// them, and where lse is far below zero their probabilities overflow.
template <int kNum>
__device__ __forceinline__ void clear_keys_past(float (&p)[kNum], int key, int64_t end) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (key + 8 * i < end) continue;
#pragma unroll
    for (int j = 0; j < kNum / 4; ++j) p[4 * j + 2 * i] = p[4 * j + 2 * i + 1] = 0;
  }
}

// A warp's 16 keys of a tile of ds, [keys, queries].
__device__ __forceinline__ void store_ds(uint32_t tile, const uint32_t (&words)[16]) {
  const uint32_t lane = threadIdx.x % 32, at = tile + threadIdx.x / 32 % 4 * 2048;
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) {
    stmatrix_4(at + swizzle_128(lane % 16, 2 * j + lane / 16), words[4 * j], words[4 * j + 1], words[4 * j + 2],
               words[4 * j + 3]);
  }
}

__device__ void multiply(Shared& shared, T* dk_out, T* dv_out, const AttentionSizes& z, const FusedWork& w,
                         FusedWalk walk) {
  const int group = threadIdx.x / kGroupThreads - 1, group_row = group * 64;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int64_t base = int64_t{w.b} * z.kv_rows, first_key_row = base + w.key + group_row, end = base + z.kv_rows;
  if (walk.steps() == 0) {
    store_zeros<kWidth>(dk_out, first_key_row, end, z.kv_heads, w.kv_head);
    return store_zeros<kWidth>(dv_out, first_key_row, end, z.kv_heads, w.kv_head);
  }
  const float scale2 = z.scale * kLog2E;
  float dk[kWidth / 2] = {}, dv[kWidth / 2] = {}, s[32], dp[32];
  const auto start_scores = [&](int stage) {
    wgmma_fence();
    multiply_rows<Keys, Queries, kWidth>(s, smem_addr(shared.k), group_row, smem_addr(shared.q[stage]));
  };
  const auto start_dp = [&](int stage) {
    wgmma_fence();
    multiply_rows<Keys, Queries, kWidth>(dp, smem_addr(shared.v), group_row, smem_addr(shared.dout[stage]));
  };
  const auto start_dq = [&](float(&dq)[32], int buffer) {
    const uint64_t left = wgmma_operand<Major::mn>(smem_addr(shared.ds[buffer][0]));
    const uint32_t k = smem_addr(shared.k) + group * Keys::kBlockBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step)
      Wgmma<Major::mn, Major::mn>::multiply(dq, left + step * (2048 >> 4), Keys::along(k, step), step > 0);
    wgmma_commit();
  };
  Ring<kDqStages> dq_ring;
  const auto wait_for_place = [&] {
    mbarrier_wait(smem_addr(&shared.dq_empty[group][dq_ring.stage]), dq_ring.parity ^ 1);
  };
  const auto pass_dq = [&](const float(&dq)[32]) {
    auto* const to = reinterpret_cast<float4*>(shared.dq[group][dq_ring.stage]) + threadIdx.x % kGroupThreads;
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i * kGroupThreads] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    fence_proxy_async();
    __syncwarp();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.dq_full[group][dq_ring.stage]));
    dq_ring.advance();
  };
  // The warpgroups take turns to start products: so those of one run while the other computes exponentials.
  const auto take_turn = [&] { named_barrier_sync(1 + group, kConsumers); };
  const auto pass_turn = [&] { named_barrier_arrive(2 - group, kConsumers); };
  Ring<kStages> ring;
  mbarrier_wait(smem_addr(&shared.keys_full), 0);
  mbarrier_wait(smem_addr(&shared.full[0]), 0);
  if (group == 1) pass_turn();  // the first one of the other
  take_turn();
  start_scores(0);
  start_dp(0);
  pass_turn();
  for (int step = 0;; walk.next()) {
    const int stage = ring.stage, buffer = step & 1;
    const Columns& columns = shared.columns[stage];
    wgmma_wait<1>();
    hold_registers(s);
    probabilities_of(s, columns, scale2, w.key + group_row + fragment().row,
                     static_cast<int>(z.shift) + walk.tile * kTileRows);
    if (w.key + kBlockKeys > z.kv_rows) clear_keys_past(s, w.key + group_row + fragment().row, z.kv_rows);
    uint32_t p_words[16], ds_words[16];
    pack(p_words, s);
    hold_words(p_words);
    wgmma_wait<0>();
    hold_registers(dp);
    dscores_of(dp, s, columns);
    pack(ds_words, dp);
    mbarrier_wait(smem_addr(&shared.ds_empty[buffer]), (step >> 1 & 1) ^ 1);
    store_ds(smem_addr(shared.ds[buffer][group]), ds_words);
    fence_proxy_async();
    take_turn();
    hold_words(ds_words);
    wgmma_fence();
    add_product<Queries, 4>(dv, p_words, smem_addr(shared.dout[stage]));
    add_product<Queries, 4>(dk, ds_words, smem_addr(shared.q[stage]));
    __syncwarp();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.ds_full[buffer]));
    if (step > 0) mbarrier_wait(smem_addr(&shared.ds_full[buffer ^ 1]), (step - 1) >> 1 & 1);
    float dq[32];
    start_dq(dq, buffer ^ 1);  // of the last step; of the first one never read
    const bool has_dq = step > 0;
    if (++step == walk.steps()) {
      wgmma_wait<0>();
      hold_registers(dq);
      hold_registers(dk);
      hold_registers(dv);
      if (has_dq) {
        wait_for_place();
        pass_dq(dq);
      }
      break;
    }
    ring.advance();
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    wait_for_place();
    wgmma_wait<0>();
    hold_registers(dq);
    hold_registers(dk);
    hold_registers(dv);
    hold_words(p_words);
    hold_words(ds_words);
    start_scores(ring.stage);
    __syncwarp();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.empty[stage]));
    if (has_dq) {
      if (is_first_lane) mbarrier_arrive(smem_addr(&shared.ds_empty[buffer ^ 1]));
      pass_dq(dq);
    }
    start_dp(ring.stage);
    pass_turn();
  }
  if (group == 0) pass_turn();  // the last one of the other
  const int last = (walk.steps() - 1) & 1;
  mbarrier_wait(smem_addr(&shared.ds_full[last]), (walk.steps() - 1) >> 1 & 1);
  float dq[32];
  start_dq(dq, last);
  wait_for_place();
  wgmma_wait<0>();
  hold_registers(dq);
  pass_dq(dq);
  const float scale[2] = {z.scale, z.scale}, one[2] = {1, 1};
  store_sums<kWidth>(dk_out, dk, scale, first_key_row, end, z.kv_heads, w.kv_head);
  store_sums<kWidth>(dv_out, dv, one, first_key_row, end, z.kv_heads, w.kv_head);
}

__global__ void __launch_bounds__(kSm90Threads, 1)
    fused_kernel(const __grid_constant__ BwdMaps maps, T* dk, T* dv, RowSums sums, FusedSlice f, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x < 32) {
    const int ticket = __shfl_sync(~0u, threadIdx.x == 0 ? atomicAdd(f.tickets, 1) : 0, 0);
    const FusedWork w = work_of_ticket(f, z, ticket);
    const int64_t begin = first_tile(z, w.key), key_end = min(int64_t{w.key} + kBlockKeys, z.kv_rows),
                  rows_end = seen_end(z, w.b, begin * kTileRows, key_end);
    if (threadIdx.x == 0) {
      shared.ticket = ticket;
      shared.end_tile = static_cast<int>(max(begin, (rows_end + kTileRows - 1) / kTileRows));
      mbarrier_init(smem_addr(&shared.keys_full), 1);
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(smem_addr(&shared.full[i]), 33);
        mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
      }
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(smem_addr(&shared.ds_full[i]), kConsumerWarps);
        mbarrier_init(smem_addr(&shared.ds_empty[i]), kConsumerWarps);
        for (int j = 0; j < kDqStages; ++j) {
          mbarrier_init(smem_addr(&shared.dq_full[i][j]), kConsumerWarps / 2);
          mbarrier_init(smem_addr(&shared.dq_empty[i][j]), 1);
        }
      }
      fence_mbarrier_init();
    }
  }
  __syncthreads();
  const FusedWork w = work_of_ticket(f, z, shared.ticket);
  const FusedWalk walk{.begin = static_cast<int>(first_tile(z, w.key)),
                       .end = shared.end_tile,
                       .heads = z.heads / z.kv_heads,
                       .heads_outer = f.heads_outer};
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0)
      load_queries(shared, maps, sums, z, w, walk);
    else if (warp < 3 && threadIdx.x % 32 == 0)
      add_dq(shared, f, z, w, walk, warp - 1);
  } else {
    more_registers<kConsumerRegisters>();
    multiply(shared, dk, dv, z, w, walk);
  }
}

// dq = scale times its sums, of a tile of queries and a head. A warpgroup has 64 columns.
__global__ void __launch_bounds__(256) round_dq_kernel(T* dq, FusedSlice f, AttentionSizes z) {
  const int heads = z.heads / z.kv_heads, tile = blockIdx.x, head = blockIdx.y, group = f.first + blockIdx.z;
  const int half = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int b = group / z.kv_heads, h = group % z.kv_heads * heads + head;
  const int64_t row = int64_t{tile} * kTileRows, last_row = z.shift + row + kTileRows - 1,
                last_block = last_row < 0 ? -1 : (last_row < z.kv_rows ? last_row : z.kv_rows - 1) / kBlockKeys;
  const int64_t first = first_key(z, b, row);
  const bool is_seen = first < z.kv_rows && first / kBlockKeys <= last_block;
  const auto* const from =
      reinterpret_cast<const float4*>(f.dq + (((int64_t{blockIdx.z} * heads + head) * f.tiles + tile) * 2 + half) *
                                                 kHalfFloats) +
      thread;
  uint32_t words[2][8];  // of two rows
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = is_seen ? from[j * kGroupThreads] : float4{0, 0, 0, 0};
    words[0][j] = pack_bf16(x.x * z.scale, x.y * z.scale);
    words[1][j] = pack_bf16(x.z * z.scale, x.w * z.scale);
  }
  // Four lanes have a row: lane c gets chunks c and c + 4 of 8 columns from words c of all of them.
  const int lane = threadIdx.x % 32, c = lane % 4;
  const int64_t r0 = row + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t* const x = words[i] + 4 * part;
      // Transposes 4 x 4 words of 4 lanes in two exchanges.
      const uint32_t a0 = c & 1 ? x[0] : x[1], a1 = c & 1 ? x[2] : x[3];
      const uint32_t b0 = __shfl_xor_sync(~0u, a0, 1), b1 = __shfl_xor_sync(~0u, a1, 1);
      if (c & 1)
        x[0] = b0, x[2] = b1;
      else
        x[1] = b0, x[3] = b1;
      const uint32_t c0 = c & 2 ? x[0] : x[2], c1 = c & 2 ? x[1] : x[3];
      const uint32_t d0 = __shfl_xor_sync(~0u, c0, 2), d1 = __shfl_xor_sync(~0u, c1, 2);
      if (c & 2)
        x[0] = d0, x[1] = d1;
      else
        x[2] = d0, x[3] = d1;
      const int64_t r = r0 + 8 * i;
      if (r < z.rows)
        *reinterpret_cast<uint4*>(dq + ((b * z.rows + r) * z.heads + h) * kWidth + half * 64 + (4 * part + c) * 8) = {
            x[0], x[1], x[2], x[3]};
    }
  }
}

}  // namespace

void sm90_fused_bwd(Stream& s, const AttentionBwd& a, const RowSums& sums, const FusedPlan& plan, void* scratch) {
  const AttentionSizes z = attention_sizes(a);
  constexpr int kBytes = sizeof(Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(fused_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const cudaStream_t stream = cuda_stream(s);
  const BwdMaps maps = bwd_maps(a, kTileRows, kBlockKeys);
  auto *const dq = static_cast<T*>(a.dq_THd.data), *const dk = static_cast<T*>(a.dk_TGd.data),
              *const dv = static_cast<T*>(a.dv_TGd.data);
  const int heads = z.heads / z.kv_heads, groups = narrow<int>(a.batch * z.kv_heads);
  FusedSlice f{.dq = static_cast<float*>(scratch),
               .key_blocks = narrow<int>(div_ceil(z.kv_rows, kBlockKeys)),
               .tiles = narrow<int>(div_ceil(z.rows, kTileRows)),
               .heads_outer = z.window > 0};
  f.tickets = reinterpret_cast<int*>(static_cast<unsigned char*>(scratch) + plan.dq_bytes);
  f.added = f.tickets + 1;
  for (f.first = 0; f.first < groups; f.first += f.groups) {
    f.groups = std::min(narrow<int>(plan.groups_of_slice), groups - f.first);
    f.wave = std::min(narrow<int>(plan.wave), f.groups);
    MOEBIUS_CUDA(cudaMemsetAsync(f.tickets, 0, plan.counter_bytes, stream));
    fused_kernel<<<f.groups * f.key_blocks, kSm90Threads, kBytes, stream>>>(maps, dk, dv, sums, f, z);
    check_launch("attention_bwd");
    round_dq_kernel<<<dim3(f.tiles, heads, f.groups), 256, 0, stream>>>(dq, f, z);
    check_launch("attention_bwd");
  }
}

}  // namespace moebius::cuda
