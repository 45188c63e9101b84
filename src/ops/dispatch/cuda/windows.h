// Code that all kernels that write into windows share: their grids, the arrays of all ranks, and the rows that return
// to the ranks of their tokens.
#pragma once

#include <algorithm>

#include "core/tensor.h"
#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/dispatch/dispatch.h"

namespace moebius::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;

// A block fills a multiprocessor, and grids loop over rows, so a limit on blocks (device/block_limit.h) limits
// multiprocessors. On a Hopper GPU the blocks are in clusters of two, like those of products that may run at the same
// time. So each kernel leaves whole clusters free for the other.
struct Grid {
  // A warp owns a row. shared_bytes: dynamic shared memory of a block.
  Grid(const Stream& s, int64_t rows, int threads, size_t shared_bytes = 0) {
    const GpuLimits& gpu = gpu_limits(s);
    const int blocks =
        std::max(1, std::min(num_blocks(rows, threads / 32), limited_blocks(s, gpu.num_multiprocessors)));
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim = {.x = gpu.is_hopper() ? 2u : 1u, .y = 1, .z = 1};
    config_.gridDim = dim3(gpu.is_hopper() ? static_cast<unsigned>(div_ceil(blocks, 2) * 2) : blocks);
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = cuda_stream(s);
    config_.attrs = &cluster_;
    config_.numAttrs = gpu.is_hopper() ? 1 : 0;
  }
  Grid(const Grid&) = delete;
  template <class... Params, class... Args>
  void launch(void (*kernel)(Params...), const Args&... args) const {
    MOEBIUS_CUDA(cudaLaunchKernelEx(&config_, kernel, args...));
  }

 private:
  cudaLaunchAttribute cluster_ = {};
  cudaLaunchConfig_t config_ = {};
};

// An array in the windows of all ranks.
struct Windows {
  const int64_t* bases;
  int64_t offset;
  int num_ranks, rank;
  unsigned long long* sent;  // bytes for other ranks: a sum of integers, which no order changes

  __device__ char* array(int64_t q) const { return reinterpret_cast<char*>(bases[q]) + offset; }
};

inline Windows windows_of(const Tensor& sent_1, const Tensor& bases_W, int64_t offset, int64_t rank) {
  return {.bases = bases_W.ptr<int64_t>(),
          .offset = offset,
          .num_ranks = narrow<int>(bases_W.numel()),
          .rank = narrow<int>(rank),
          .sent = reinterpret_cast<unsigned long long*>(sent_1.ptr<int64_t>())};
}

// Adds the bytes of all lanes of a warp to the counter. All lanes call it.
__device__ __forceinline__ void add_sent(const Windows& to, int64_t bytes_of_lane) {
  const auto bytes = static_cast<unsigned long long>(warp_sum(static_cast<long long>(bytes_of_lane)));
  if (threadIdx.x % 32 == 0 && bytes > 0) atomicAdd(to.sent, bytes);
}

// Rows that return to the ranks that they came from.
struct Return {
  const int32_t *pair_row_NL, *arrive_W1, *back_W;
  const float* weight_NL;  // may be null
  int num_pairs;           // pairs of a row: L
  RowDistances of;         // distances of the rows that return
};

// Returns the rank that row n came from. All lanes of the warp call it.
__device__ __forceinline__ int source_of(const Return& a, const Windows& to, int64_t n) {
  int source = 0;
  for (int first = 0; first < to.num_ranks; first += 32) {
    const int q = first + static_cast<int>(threadIdx.x % 32);
    const bool is_before = q < to.num_ranks && a.arrive_W1[q + 1] <= n;
    source += __popc(__ballot_sync(kAllLanes, is_before));
  }
  return source;
}

// The order in which rows return. The rows of this rank are spread evenly among those of other ranks, so that the
// memory and the links work at the same time. The rows of others begin with those of the rank at the largest
// distance. So different ranks begin with different ranks.
class ReturnOrder {
 public:
  __device__ ReturnOrder(const Return& a, const Windows& to) : own_begin_(a.arrive_W1[to.rank]) {
    const int32_t own = a.of.has(0) ? a.arrive_W1[to.rank + 1] - own_begin_ : 0;
    const RowDistances others{.first = a.of.first > 0 ? a.of.first : 1, .end = a.of.end};
    num_rows_ = own;
    if (others.count(to.num_ranks) > 0) {
      const SourceRanks from = source_ranks(others, to.rank, to.num_ranks);
      const int32_t end = a.arrive_W1[from.last + 1], all = a.arrive_W1[to.num_ranks];
      first_other_ = a.arrive_W1[from.first];
      others_before_wrap_ = (from.wraps() ? all : end) - first_other_;
      num_rows_ += others_before_wrap_ + (from.wraps() ? end : 0);
    }
    const auto num_rows = static_cast<uint64_t>(num_rows_);
    own_of_turn_ = num_rows == 0 ? 0 : ((static_cast<uint64_t>(own) << 32) + num_rows - 1) / num_rows;
  }
  __device__ uint32_t num_rows() const { return static_cast<uint32_t>(num_rows_); }
  // Returns the row that returns as number `turn`. REQUIRES: turn < num_rows().
  __device__ int32_t row(uint32_t turn) const {
    const uint64_t scaled = turn * own_of_turn_;          // below 2^63: turn is below 2^31, own_of_turn_ at most 2^32
    const auto own = static_cast<int32_t>(scaled >> 32);  // rows of this rank among the first `turn`
    if (static_cast<int32_t>((scaled + own_of_turn_) >> 32) > own) return own_begin_ + own;
    const int32_t other = static_cast<int32_t>(turn) - own;
    return other < others_before_wrap_ ? first_other_ + other : other - others_before_wrap_;
  }

 private:
  int32_t own_begin_;               // the first row of this rank
  int32_t first_other_ = 0;         // the first row of others that returns
  int32_t others_before_wrap_ = 0;  // rows of others from there on; row 0 follows them
  int32_t num_rows_;                // rows that return
  uint64_t own_of_turn_;            // rows of this rank for each that returns, times 2^32, rounded up
};

template <class Op>
Return return_of(const Op& a) {
  return {.pair_row_NL = a.pair_row_NL.template ptr<int32_t>(),
          .arrive_W1 = a.arrive_W1.template ptr<int32_t>(),
          .back_W = a.back_W.template ptr<int32_t>(),
          .weight_NL = nullptr,
          .num_pairs = narrow<int>(a.pair_row_NL.dim(1)),
          .of = {}};
}

}  // namespace moebius::cuda
