// expert_wgrad by wgmma: k runs over the rows of an expert, so both operands are MN-major.
//
// One side is gathered row by row (dout for dw2, x for dw1); the other is read in place by TMA. A tile is 128 columns
// of the gathered side by 256 of the other, and either of them can be the left one. A cluster is two blocks with the
// same 256 columns and neighbouring 128s. Each loads half of the 256 columns for both.
//   producer   a warpgroup: the gathered side by cp.async, the other by TMA; the last rows of an expert, fewer than
//              kDepth, by cp.async on both sides, with zeros after them (the memory there may hold NaN). It alone walks
//              the tiles; the next tile and what its first steps read are looked up while this one is loaded
//   consumers  two warpgroups of 64 x 256 sums, 128 registers a thread. What they need of a tile is a note beside its
//              first slot
// Half of the work of adding a tile to dw is done between the products of two tiles, and the rest between the K steps
// of the next tile: sm90/expert_wgrad_adder.h, and sm90/expert_wgrad_rounder.h for a dw in bf16. Experts are
// processed by falling row count, which balances the load of the blocks.
#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_desc.h"
#include "ops/experts/sm90/expert_wgrad_adder.h"
#include "ops/experts/sm90/expert_wgrad_rounder.h"
#include "ops/experts/sm90/expert_wgrad_walk.h"
#include "ops/grouped_gemm/sm90/slots.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kMaxExperts = 512;

// The description of a tile for the consumers; it is valid while the tile's first slot is full. num_steps 0: there are
// no more tiles.
struct TileNote {
  TileTag tag;
  int gather_col, plain_col;
  int num_steps;  // negative: of a tile whose sums are added to dw, not stored
};

static_assert(kMaxExperts <= 1 << TileTag::kExpertBits);

// The layout of a block's shared memory for a config. The rows of a tile are columns of the gathered side, whether that
// is A or B. Clusters along it share columns of the other side while they are in L2.
template <GroupedGemmConfig kOpConfig>
struct WgradLayout {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  static constexpr int kGatherCols = kConfig.tile_m, kPlainCols = kConfig.tile_n, kDepth = kConfig.tile_k;
  static constexpr int kSlots = kConfig.num_slots, kThreads = kConfig.threads;
  static_assert(kConfig.num_notes == kSlots, "each slot has one note");
  static_assert(kGatherCols == 128 && kPlainCols == kPieces * 32 && kDepth == 64 && kConfig.element_bytes == 2,
                "the threads' shares of the copies and of the sums are for tiles 128 x 256 x 64 of two bytes");
  static constexpr uint32_t kBlockBytes = 64 * kDepth * kConfig.element_bytes;  // kDepth rows x 64 columns
  static constexpr uint32_t kGatherBytes = kConfig.slot_bytes_a(), kPlainBytes = kConfig.slot_bytes_b();

  struct Shared {
    alignas(1024) unsigned char slot[kSlots][kGatherBytes + kPlainBytes];
    alignas(1024) unsigned char staging[4 * kConfig.num_consumers()][kStagingPlaces * kPieceBytes];
    uint64_t barriers[2 * kSlots];
    uint64_t place_barriers[4 * kConfig.num_consumers()][kPlaces];  // of the consumer warps, with a dw in bf16
    alignas(16) TileNote notes[kSlots];
    int32_t order[kMaxExperts];  // experts by falling row count
    int32_t num_active;          // those with rows
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
  using Ring = Slots<kSlots, kGatherBytes + kPlainBytes>;
  using Cursor = cuda::Ring<kSlots>;
};

// Returns the source of this lane's row of the 64 from `row` on, which is i = lane % 8 of the half warp
// lane / 8 % 2 in GatheredColumns; past the end, of the last row.
__device__ __forceinline__ int read_index(const Side& side, int row, int end) {
  const int lane_row = static_cast<int>(threadIdx.x / 32 * 2 + threadIdx.x / 8 % 2 + threadIdx.x % 8 * 8);
  int index = min(row + lane_row, end - 1);
  if (side.index) asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(index) : "l"(side.index + index));
  return index;
}

// Copies the gathered side: thread t copies the 16-byte chunk t % 16 of rows t / 16 + 8 i, so that its positions in
// shared memory are 1024 bytes apart. To keep up with the tensor cores, addresses are computed before the slot is free,
// and kept in registers.
template <class L>
struct GatheredColumns {
  static constexpr int kNum = L::kDepth / 8;
  const char* x;    // this thread's chunk of row 0
  uint32_t place;   // of its first row in the tile
  uint32_t chunks;  // in a row
  bool inside;
  const char* from[kNum];

  __device__ __forceinline__ GatheredColumns(const Side& side, int col) : chunks(side.width / 8) {
    const int chunk = threadIdx.x % 16;
    inside = col + chunk * 8 < side.width;
    x = reinterpret_cast<const char*>(side.x + (inside ? col + chunk * 8 : 0));
    place = chunk / 8 * L::kBlockBytes + swizzle_128(threadIdx.x / 16, chunk % 8);
  }
  // Converts the result of read_index to addresses.
  __device__ __forceinline__ void find(int index) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      const int source = __shfl_sync(0xffffffffu, index, i + threadIdx.x / 16 % 2 * 8);
      from[i] = chunk_address(x, static_cast<uint32_t>(source) * chunks);
    }
  }
  // Copies all 64 rows, or those before `end` with zeros after them.
  __device__ __forceinline__ void copy(uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kNum; ++i) cp_async_16(to + place + i * 1024, from[i], inside);
  }
  __device__ __forceinline__ void copy_last(uint32_t to, int row, int end) const {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      cp_async_16(to + place + i * 1024, from[i], inside && row + static_cast<int>(threadIdx.x / 16) + 8 * i < end);
    }
  }
};

// Copies the last rows of an expert of the plain side: thread t copies chunk t % 32 of rows t / 32 + 4 i.
template <class L>
__device__ __forceinline__ void copy_last_rows(uint32_t to, const Side& side, int col, int row, int end) {
  const int chunk = threadIdx.x % 32, first = threadIdx.x / 32;
  const bool inside = col + chunk * 8 < side.width;
  const __nv_bfloat16* x = side.x + static_cast<int64_t>(row + first) * side.width + (inside ? col + chunk * 8 : 0);
  const uint32_t place = to + chunk / 8 * L::kBlockBytes + swizzle_128(first, chunk % 8);
#pragma unroll
  for (int i = 0; i < L::kDepth / 4; ++i) {
    const bool valid = inside && row + first + 4 * i < end;
    // Rows 4 apart differ in one bit of the swizzle.
    cp_async_16((place ^ (i % 2 * 64)) + i * 512, valid ? x : side.x, valid);
    x += 4 * side.width;
  }
}

template <class L, bool kGather>
__device__ __forceinline__ void load_whole(const CUtensorMap& gathered, const CUtensorMap& plain, const Tile& tile,
                                           uint32_t to, uint32_t full, int row, uint32_t rank) {
  mbarrier_arrive_expect(full, L::kPlainBytes + (kGather ? 0 : L::kGatherBytes));
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int at = 2 * rank + block;
    tma_load_multicast(to + L::kGatherBytes + at * L::kBlockBytes, &plain, full, 3, tile.plain_col + 64 * at, row);
    if (!kGather) tma_load(to + block * L::kBlockBytes, &gathered, full, tile.gather_col + 64 * block, row);
  }
}

// A note is written by the thread that then arrives at its slot's full barrier, and read by
// consumers before they release the slot.
__device__ __forceinline__ void write_note(uint32_t to, const TileNote& n) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(n.tag.bits), "r"(n.gather_col),
               "r"(n.plain_col), "r"(n.num_steps)
               : "memory");
}
__device__ __forceinline__ TileNote read_note(uint32_t from) {
  TileNote n;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(n.tag.bits), "=r"(n.gather_col), "=r"(n.plain_col), "=r"(n.num_steps)
               : "r"(from)
               : "memory");
  return n;
}
__device__ __forceinline__ uint32_t note_at(uint32_t notes, int slot) { return notes + sizeof(TileNote) * slot; }

template <class L, bool kGather, bool kRounds>
__device__ void produce(const CUtensorMap& gathered, const CUtensorMap& plain, const Params& p,
                        const typename L::Shared& s, const typename L::Ring& ring, uint32_t notes) {
  const uint32_t rank = cluster_block_rank();
  typename L::Cursor at;
  Walk<L, kRounds> walk(p, s);
  Tile next;
  int first = 0, second = 0;  // indices of the next tile's first two steps
  const auto look_ahead = [&] {
    const bool more = walk.next(next);
    if (kGather && more) {
      first = read_index(p.gathered, next.begin, next.end);
      second = read_index(p.gathered, next.begin + L::kDepth, next.end);
    }
    return more;
  };
  bool more = look_ahead();
  while (more) {
    const Tile tile = next;
    GatheredColumns<L> columns(p.gathered, tile.gather_col);
    int soon = second, later = 0;  // indices of the two steps after the one whose addresses are found
    if (kGather) {
      later = read_index(p.gathered, tile.begin + 2 * L::kDepth, tile.end);
      columns.find(first);
    }
#pragma unroll 1
    for (int row = tile.begin; row < tile.end; row += L::kDepth, at.advance()) {
      const uint32_t full = ring.full(at.stage), to = ring.slot(at.stage);
      const bool whole = row + L::kDepth <= tile.end;
      const bool one_thread = static_cast<int>(threadIdx.x) == 32 * at.stage;  // warps load in turn
      mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
      if (one_thread && row == tile.begin) {
        const int num_steps = (tile.end - tile.begin + L::kDepth - 1) / L::kDepth;
        write_note(note_at(notes, at.stage),
                   {tile.tag, tile.gather_col, tile.plain_col, tile.adds ? -num_steps : num_steps});
      }
      if (whole) {
        if (kGather) columns.copy(to);
        mbarrier_arrive_cp_async(full);
        if (one_thread) load_whole<L, kGather>(gathered, plain, tile, to, full, row, rank);
      } else {
        __syncwarp();
        if (!kGather) columns.find(read_index(p.gathered, row, tile.end));
        columns.copy_last(to, row, tile.end);
        copy_last_rows<L>(to + L::kGatherBytes, p.plain, tile.plain_col, row, tile.end);
        mbarrier_arrive_cp_async(full);
        if (one_thread) mbarrier_arrive(full);
      }
      __syncwarp();
      if (kGather) {
        columns.find(soon);
        soon = later;
        later = read_index(p.gathered, row + 3 * L::kDepth, tile.end);
      }
      if (row == tile.begin) more = look_ahead();
    }
  }
  mbarrier_wait(ring.empty(at.stage), at.parity ^ 1);
  if (static_cast<int>(threadIdx.x) == 32 * at.stage) {
    write_note(note_at(notes, at.stage), {});
    mbarrier_arrive(ring.full(at.stage));
  }
  mbarrier_arrive(ring.full(at.stage));
}

// Computes the 64 x 256 sums of a warpgroup step by step. A slot is released after the wgmmas of the next
// slot are queued.
template <class L>
struct Product {
  const typename L::Ring& ring;
  SlotOperand<Major::mn> a, b;
  typename L::Cursor at;
  uint32_t before = 0;

  __device__ __forceinline__ Product(const typename L::Ring& ring, uint32_t group)
      : ring(ring),
        a(ring.first + group * L::kBlockBytes, L::kBlockBytes),
        b(ring.first + L::kGatherBytes, L::kBlockBytes) {}

  // Waits until the next step's slot is full. For the first step of a tile this was done before its note was read.
  __device__ __forceinline__ void wait() const { mbarrier_wait(ring.full(at.stage), at.parity); }
  template <bool kFirst>
  __device__ __forceinline__ void step(float (&sum)[128]) {
    if (!kFirst) wait();
    fence_proxy_async();  // cp.async writes as ordinary stores do
    const uint32_t slot = at.stage * (L::kGatherBytes + L::kPlainBytes);
    hold_registers(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < L::kDepth / 16; ++k) {
      Wgmma<Major::mn, Major::mn>::multiply(sum, a.at(slot + k * 2048), b.at(slot + k * 2048), !kFirst || k > 0);
    }
    wgmma_commit();
    if (!kFirst) {
      wgmma_wait<1>();
      ring.release(before);
    }
    before = at.stage;
    at.advance();
  }
  __device__ __forceinline__ void finish(float (&sum)[128]) const {
    wgmma_wait<0>();
    hold_registers(sum);
    ring.release(before);
  }
};

// Every kTurnSteps steps a held piece of the previous tile is added to dw. A warpgroup that stages a piece does not
// feed the tensor cores, so the two warpgroups alternate, half a period apart.
constexpr int kTurnSteps = 4;

template <class L, bool kGatheredIsLeft>
__device__ __forceinline__ void consume_and_add(const CUtensorMap& dw, const typename L::Ring& ring, uint32_t notes,
                                                uint32_t staging) {
  const uint32_t warp = uniform(threadIdx.x / 32 - 4), group = warp / 4;
  constexpr int kHalfTurn = kTurnSteps / 2, kStepsWithTurns = kTurnSteps * kHeldPieces;
  Product<L> product(ring, group);
  SumAdder<kGatheredIsLeft> adder{dw, staging + warp * kStagingPlaces * kPieceBytes};
  for (;;) {
    product.wait();
    const TileNote tile = read_note(note_at(notes, product.at.stage));
    const int num_steps = static_cast<int>(uniform(abs(tile.num_steps)));
    if (num_steps == 0) break;
    float sum[128];
    for_each_constant<0, kStepsWithTurns>([&](auto step) {
      constexpr int k = decltype(step)::value;
      if (k == 0 || k < num_steps) product.step<k == 0>(sum);
      if constexpr (k % kHalfTurn == 0) {
        if (adder.pending && group == k / kHalfTurn % 2) adder.template add_held<k / kTurnSteps>();
      }
    });
#pragma unroll 1
    for (int k = kStepsWithTurns; k < num_steps; ++k) product.step<false>(sum);
    product.finish(sum);
    adder.take(sum, tile.tag.bits, tile.gather_col + 16 * static_cast<int>(warp), tile.plain_col, tile.num_steps < 0);
  }
  adder.finish();
}

// The same with a dw in bf16. Turn t of a warpgroup is at step 2 t or 2 t + 1, so the two alternate here, too.
template <class L, bool kGatheredIsLeft>
__device__ __forceinline__ void consume_and_round(const CUtensorMap& dw, const Params& p, const typename L::Ring& ring,
                                                  uint32_t notes, uint32_t staging, uint32_t place_barriers) {
  const uint32_t warp = uniform(threadIdx.x / 32 - 4), group = warp / 4;
  Product<L> product(ring, group);
  SumRounder<kGatheredIsLeft> rounder{.dw = dw,
                                      .p = p,
                                      .staging = staging + warp * kPlaces * kRoundedBytes,
                                      .barriers = place_barriers + warp * kPlaces * 8};
  for (;;) {
    product.wait();
    const TileNote note = read_note(note_at(notes, product.at.stage));
    const int num_steps = static_cast<int>(uniform(abs(note.num_steps)));
    if (num_steps == 0) break;
    const typename SumRounder<kGatheredIsLeft>::Place at{.tag = {static_cast<int>(uniform(note.tag.bits))},
                                                         .gathered = note.gather_col + 16 * static_cast<int>(warp),
                                                         .plain = note.plain_col};
    float sum[128];
    for_each_constant<0, 2 * kTurns>([&](auto step) {
      constexpr int k = decltype(step)::value;
      if (k == 0 || k < num_steps) product.template step<k == 0>(sum);
      if (group == k % 2) rounder.template turn<k / 2>(at);
    });
#pragma unroll 1
    for (int k = 2 * kTurns; k < num_steps; ++k) product.template step<false>(sum);
    product.finish(sum);
    rounder.take(sum, at);
  }
  rounder.finish();
}

template <class L, bool kGather, bool kGatheredIsLeft, bool kRounds>
__global__ void __cluster_dims__(L::kConfig.cluster) __launch_bounds__(L::kThreads, 1)
    expert_wgrad_kernel(const __grid_constant__ CUtensorMap gathered, const __grid_constant__ CUtensorMap plain,
                        const __grid_constant__ CUtensorMap dw, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  typename L::Shared& s = *reinterpret_cast<typename L::Shared*>(memory);
  const typename L::Ring ring{uniform(smem_addr(s.slot)), uniform(smem_addr(s.barriers))};
  const uint32_t notes = uniform(smem_addr(s.notes)), staging = uniform(smem_addr(s.staging));
  const uint32_t place_barriers = uniform(smem_addr(s.place_barriers));
  if (threadIdx.x == 0) {
    for (int i = 0; kRounds && i < 4 * L::kConfig.num_consumers() * kPlaces; ++i)
      mbarrier_init(place_barriers + 8 * i, 1);
    ring.init(128 + 1, 2 * 8);  // full: producer threads, bytes; empty: all warps
  }
  order_experts<L>(p, s);
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<L::kConfig.producer_registers>();
    produce<L, kGather, kRounds>(gathered, plain, p, s, ring, notes);
  } else {
    more_registers<L::kConfig.consumer_registers>();
    if constexpr (kRounds)
      consume_and_round<L, kGatheredIsLeft>(dw, p, ring, notes, staging, place_barriers);
    else
      consume_and_add<L, kGatheredIsLeft>(dw, ring, notes, staging);
  }
  __syncwarp();
  cluster_sync();  // neither block exits while the other may still access its shared memory
}

// Experts without rows have no tiles: their gradients are zeros. A row of blocks clears one expert.
// per_expert: in 16 bytes.
__global__ void clear_idle_experts_kernel(float4* dw, const int32_t* offsets, int64_t per_expert) {
  const int expert = static_cast<int>(blockIdx.y);
  if (offsets[expert] != offsets[expert + 1]) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < per_expert; i += threads) {
    dw[expert * per_expert + i] = {};
  }
}

void clear_idle_experts(Stream& s, const Tensor& dw_eMN, const Tensor& offsets_e1) {
  constexpr unsigned kBlocks = 8, kThreads = 256;
  const int64_t E = dw_eMN.dim(0);
  clear_idle_experts_kernel<<<dim3(kBlocks, static_cast<unsigned>(E)), kThreads, 0, cuda_stream(s)>>>(
      static_cast<float4*>(dw_eMN.data), offsets_e1.ptr<int32_t>(), dw_eMN.num_bytes() / E / 16);
  check_launch("expert_wgrad");
}

using Kernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, Params);

template <class L, bool kRounds>
struct State {
  int num_blocks = 0;
  State() {
    for (const Kernel kernel :
         {expert_wgrad_kernel<L, true, true, kRounds>, expert_wgrad_kernel<L, true, false, kRounds>,
          expert_wgrad_kernel<L, false, true, kRounds>}) {
      num_blocks = persistent_blocks(reinterpret_cast<const void*>(kernel), sizeof(typename L::Shared));
    }
  }
};

template <class L>
CUtensorMap map_of(const Tensor& x) {
  return make_tensor_map<2>(x.data, {{{x.dim(1), 1, 64}, {x.dim(0), x.dim(1), L::kDepth}}});
}

// The boxes of pieces of dw [E, M, N].
CUtensorMap map_of_dw(const Tensor& dw_eMN, bool gathered_is_left) {
  const int64_t E = dw_eMN.dim(0), M = dw_eMN.dim(1), N = dw_eMN.dim(2);
  const std::array<BoxDim, 3> dims{
      {{N, 1, gathered_is_left ? 32u : 16u}, {M, N, gathered_is_left ? 16u : 32u}, {E, M * N, 1}}};
  if (dw_eMN.dtype == DType::bf16)
    return make_tensor_map<3>(dw_eMN.data, dims,
                              {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                               gathered_is_left ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B});
  return make_tensor_map<3>(
      dw_eMN.data, dims,
      {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, gathered_is_left ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B});
}

template <class L, bool kRounds>
void launch(Stream& s, const ExpertWgrad& a) {
  const int32_t* index = index_of(a.rows);
  const bool left_first = !(a.gather_right && index);  // the left side is the one taken as gathered
  const bool gather = (a.gather_left || a.gather_right) && index;
  const Tensor& gathered = left_first ? a.left_RM.data : a.right_RN.data;
  const Tensor& plain = left_first ? a.right_RN.data : a.left_RM.data;
  const auto side = [](const Tensor& x, const int32_t* rows) {
    return Side{static_cast<const __nv_bfloat16*>(x.data), rows, static_cast<int>(x.dim(1))};
  };
  const int num_blocks = op_state<State<L, kRounds>>(s).num_blocks;
  const int64_t parts_bytes = int64_t{num_blocks} * kPartsOfBlock * 16;
  if (kRounds)
    MOEBIUS_CHECK(internal, parts_bytes <= a.scratch.num_bytes(),
                  "expert_wgrad: expected scratch for the cut tiles of {} blocks, {} bytes; got {}; raise "
                  "kMaxWgradBlocks",
                  num_blocks, parts_bytes, a.scratch.num_bytes());
  const Params p{.gathered = side(gathered, gather ? index : nullptr),
                 .plain = side(plain, nullptr),
                 .offsets = a.rows.offsets_e1.ptr<int32_t>(),
                 .num_experts = static_cast<int>(a.dw_eMN.dim(0)),
                 .gather_steps = static_cast<int>(div_ceil(gathered.dim(1), 2 * L::kGatherCols)),
                 .plain_steps = static_cast<int>(div_ceil(plain.dim(1), L::kPlainCols)),
                 .max_clusters = num_blocks / 2,
                 .accumulate = a.accumulate,
                 .first_parts = static_cast<float4*>(a.scratch.data)};
  const Kernel kernel = !gather      ? expert_wgrad_kernel<L, false, true, kRounds>
                        : left_first ? expert_wgrad_kernel<L, true, true, kRounds>
                                     : expert_wgrad_kernel<L, true, false, kRounds>;
  if (!a.accumulate) clear_idle_experts(s, a.dw_eMN, a.rows.offsets_e1);
  kernel<<<limited_blocks(s, num_blocks), L::kThreads, sizeof(typename L::Shared), cuda_stream(s)>>>(
      map_of<L>(gathered), map_of<L>(plain), map_of_dw(a.dw_eMN, left_first), p);
  check_launch("expert_wgrad");
}
}  // namespace

bool takes(const ExpertWgrad& a) {
  const bool one_side = !(a.gather_left && a.gather_right) || a.rows.token_R.empty();
  const int64_t left = a.left_RM.data.dim(0), right = a.right_RN.data.dim(0);
  const bool countable = left > 0 && right > 0 && left + right < INT32_MAX / 2 &&
                         a.left_RM.data.numel() / 8 < INT32_MAX && a.right_RN.data.numel() / 8 < INT32_MAX;
  return a.left_RM.data.dtype == DType::bf16 && one_side && countable && a.dw_eMN.dim(0) <= kMaxExperts &&
         rows_are_aligned({a.left_RM.data, a.right_RN.data}) && aligned_16({a.dw_eMN});
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  with_config<kSm90Wgrad>(choose_config(describe(a)), "expert_wgrad", [&]<GroupedGemmConfig kConfig>() {
    a.dw_eMN.dtype == DType::bf16 ? launch<WgradLayout<kConfig>, true>(s, a)
                                  : launch<WgradLayout<kConfig>, false>(s, a);
  });
}

}  // namespace moebius::cuda::sm90
