// The parts that the files of the CUDA router share: the layout of scratch and the functions of
// each file. It is plain C++, since sizes are also needed on machines without a GPU.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "ops/routing/routing.h"

namespace moebius::cuda {

constexpr int64_t kTokensPerBlock = 64;     // of route_fwd: the bits of a mask
constexpr int64_t kTokensPerPartial = 128;  // of sinkhorn: the CPU's block, so that sums have the CPU's order
constexpr int64_t kTokensPerChunk = 32;     // of balance_stats

// Parts of scratch one after the other, each aligned to 256 bytes. Without a base they only count.
class ScratchParts {
 public:
  explicit ScratchParts(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}
  template <class T>
  void place(T*& part, int64_t count) {
    part = reinterpret_cast<T*>(base_ + static_cast<uintptr_t>(num_bytes_));
    num_bytes_ += div_ceil(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  uintptr_t base_;
  int64_t num_bytes_ = 0;
};

// Scratch of route_fwd; B blocks of kTokensPerBlock tokens, P of kTokensPerPartial.
struct RouteScratch {
  int32_t* start_BE;      // rows of an expert in a block; then the rows it has in the blocks before
  int32_t* total_E;       // rows of an expert in all blocks
  uint64_t* key_N;        // drop by probs: the sort keys of an expert's pairs
  uint64_t* last_key_E;   // drop by probs: the last that is kept
  float* cost_TE;         // sinkhorn
  float* partial_PE;      // sinkhorn: column sums
  float* column_scale_E;  // sinkhorn: d1
  float* moved_1;         // sinkhorn: the mean change of d1
  int64_t num_bytes;

  RouteScratch(void* base, int64_t num_tokens, int64_t num_experts, int64_t top_k, const RouteRule& rule) {
    const int64_t drops = rule.capacity > 0 && rule.drop == RouteDrop::probs ? 1 : 0;
    const int64_t balances = rule.choice == RouteChoice::sinkhorn ? 1 : 0;
    ScratchParts parts(base);
    parts.place(start_BE, div_ceil(num_tokens, kTokensPerBlock) * num_experts);
    parts.place(total_E, num_experts);
    parts.place(key_N, drops * num_tokens * top_k);
    parts.place(last_key_E, drops * num_experts);
    parts.place(cost_TE, balances * num_tokens * num_experts);
    parts.place(partial_PE, balances * div_ceil(num_tokens, kTokensPerPartial) * num_experts);
    parts.place(column_scale_E, balances * num_experts);
    parts.place(moved_1, balances);
    num_bytes = parts.num_bytes();
  }
};

// Scratch of balance_stats; C chunks of tokens, S segments. The tokens are divided into at most S + C - 1 pieces, each
// within one segment and one chunk; the number of a piece is segment + chunk.
struct BalanceScratch {
  float *prob_PE, *count_PE;  // sums of a piece
  double *z_C, *entropy_C;
  int64_t num_bytes;

  BalanceScratch(void* base, int64_t num_tokens, int64_t num_experts, int64_t num_segments) {
    const int64_t chunks = div_ceil(num_tokens, kTokensPerChunk), pieces = chunks + num_segments;
    ScratchParts parts(base);
    parts.place(prob_PE, pieces * num_experts);
    parts.place(count_PE, pieces * num_experts);
    parts.place(z_C, chunks);
    parts.place(entropy_C, chunks);
    num_bytes = parts.num_bytes();
  }
};

// cuda/sinkhorn.cu: cost and column_scale, with the CPU's bits.
void sinkhorn(Stream& s, const RouteFwd& a, const RouteScratch& scratch);

// cuda/route_index.cu. REQUIRES of each: start_BE holds the counts of each block.
// start_BE and total_E from the counts of blocks; load += total_E when add_load.
void scan_blocks(Stream& s, const RouteFwd& a, const RouteScratch& scratch, bool add_load);
// counts, offsets, dropped, and the index of each pair within capacity.
// dropped_before: pairs whose pair_row is -1 are dropped already.
void index_rows(Stream& s, const RouteFwd& a, const RouteScratch& scratch, bool dropped_before);

// cuda/route_drop.cu: marks the pairs with the least weights of full experts (pair_row -1, weight
// 0) and stores the counts of kept pairs in start_BE. REQUIRES: scan_blocks.
void drop_light(Stream& s, const RouteFwd& a, const RouteScratch& scratch);

}  // namespace moebius::cuda
