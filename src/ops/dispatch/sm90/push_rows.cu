// Rows into windows by the bulk copy engine: a few multiprocessors keep a link full, since rows wait in shared memory
// and not in registers. Each warp has a ring of slots. A slot gets a piece of a token's row, and its copies leave from
// there; some slots are on their way in while others are on their way out. No copy depends on another warp.
#include <algorithm>

#include "device/block_limit.h"
#include "ops/dispatch/cuda/windows.h"
#include "ops/sm90/copy.h"
#include "ops/sm90/sync.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kSlots = 12, kLeaving = 6;  // of a warp; of these, slots whose copies may still be read
constexpr int kPieceBytes = 4096;
constexpr int64_t kLeastBytes = 1024;  // of a row: below, the engine's own time shows
constexpr int kMaxBlocks = 64;         // a link is full before
constexpr int kSharedBytes = kWarps * kSlots * kPieceBytes;

struct Shared {
  alignas(128) unsigned char slots[kWarps][kSlots][kPieceBytes];
  char* places[kWarps][kSlots][32];
  uint64_t full[kWarps][kSlots];
};
static_assert(sizeof(Shared) <= 227 * 1024 && kSharedBytes <= static_cast<int>(sizeof(Shared)));

// A walk of a warp over the pieces of its tokens' rows.
struct Pieces {
  int64_t token, stride, num_tokens, row_bytes, at = 0;

  __device__ bool is_over() const { return token >= num_tokens; }
  __device__ uint32_t bytes() const {
    return static_cast<uint32_t>(row_bytes - at < kPieceBytes ? row_bytes - at : kPieceBytes);
  }
  __device__ void next() {
    at += kPieceBytes;
    if (at >= row_bytes) at = 0, token += stride;
  }
};

// Lane j issues the copies of place j, and waits for its own. The blocks are in clusters for the sake of products beside
// them, whose clusters of two need two multiprocessors of one group.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) push_rows_kernel(Push a, Windows to) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < kSlots) mbarrier_init(smem_addr(&s.full[warp][lane]), 1);
  fence_mbarrier_init();
  __syncwarp();
  Pieces in{.token = int64_t{blockIdx.x} * kWarps + warp,
            .stride = int64_t{gridDim.x} * kWarps,
            .num_tokens = a.num_tokens,
            .row_bytes = a.row_bytes};
  Pieces out = in;
  int64_t sent = 0;
  char* place = nullptr;  // of this lane's copy of the row that is being loaded
  const auto load = [&](int slot) {
    if (in.is_over()) return;
    if (in.at == 0) place = lane < a.copies() ? a.place(to, in.token, lane, sent) : nullptr;
    s.places[warp][slot][lane] = place ? place + in.at : nullptr;
    if (lane == 0) {
      const uint32_t full = smem_addr(&s.full[warp][slot]);
      mbarrier_arrive_expect(full, in.bytes());
      bulk_load(smem_addr(s.slots[warp][slot]), a.x + in.token * a.row_bytes + in.at, in.bytes(), full);
    }
    in.next();
  };
  for (int slot = 0; slot < kSlots - kLeaving; ++slot) load(slot);
  Ring<kSlots> at;
  for (int fill = kSlots - kLeaving; !out.is_over(); out.next(), at.advance()) {
    mbarrier_wait(smem_addr(&s.full[warp][at.stage]), at.parity);
    if (char* const copy = s.places[warp][at.stage][lane]) {
      bulk_store(copy, smem_addr(s.slots[warp][at.stage]), out.bytes());
    }
    tma_commit();
    tma_wait_read<kLeaving>();  // the slot that is filled next has left
    __syncwarp();
    load(fill);
    if (++fill == kSlots) fill = 0;
  }
  tma_wait<0>();
  add_sent(to, sent);
}

struct Launch {
  Launch() {
    MOEBIUS_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(&push_rows_kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  }
};

}  // namespace

bool takes(const Push& a, int64_t offset) {
  const auto places = reinterpret_cast<uintptr_t>(a.x) | static_cast<uintptr_t>(a.row_bytes | offset);
  return places % 16 == 0 && a.row_bytes >= kLeastBytes && a.num_dest * a.etp <= 32;
}

void push_rows(Stream& s, const Push& a, const Windows& to) {
  op_state<Launch>(s);
  const int64_t wanted = std::min<int64_t>(div_ceil(a.num_tokens, kWarps), limited_blocks(s, kMaxBlocks));
  const int blocks = static_cast<int>(div_ceil(wanted, 2) * 2);
  push_rows_kernel<<<blocks, kThreads, sizeof(Shared), cuda_stream(s)>>>(a, to);
  check_launch("push_rows");
}

}  // namespace moebius::cuda::sm90
