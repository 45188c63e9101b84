// Rows between windows. A warp owns a row; a block fills a multiprocessor, and grids loop, so that a limit on blocks
// (device/block_limit.h) is one on multiprocessors. No kernel waits for another rank: rounds do (comm/peer_window.h).
#include <algorithm>

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 1024;    // of a block
constexpr int kSumThreads = 512;  // of one that sums: its threads have more registers
constexpr int kAtOnce = 8;        // words of a thread on their way, of a row that is copied
constexpr int kSumsAtOnce = 4;    // and of each of the rows that are summed
constexpr int kRowsAtOnce = 4;    // such rows
constexpr uint32_t kAllLanes = 0xffffffffu;

// On a Hopper GPU the blocks are in clusters of two, as those of products that may run beside them: what both leave
// free is whole clusters.
struct Grid {
  Grid(const Stream& s, int64_t rows, int threads) {
    const GpuLimits& gpu = gpu_limits(s);
    const int blocks =
        std::max(1, std::min(num_blocks(rows, threads / 32), limited_blocks(s, gpu.num_multiprocessors)));
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim = {.x = gpu.is_hopper() ? 2u : 1u, .y = 1, .z = 1};
    config_.gridDim = dim3(gpu.is_hopper() ? static_cast<unsigned>(div_ceil(blocks, 2) * 2) : blocks);
    config_.blockDim = dim3(static_cast<unsigned>(threads));
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

Windows windows_of(const Tensor& sent_1, const Tensor& bases_W, int64_t offset, int64_t rank) {
  return {.bases = bases_W.ptr<int64_t>(),
          .offset = offset,
          .num_ranks = narrow<int>(bases_W.numel()),
          .rank = narrow<int>(rank),
          .sent = reinterpret_cast<unsigned long long*>(sent_1.ptr<int64_t>())};
}

// All lanes of a warp call it.
__device__ __forceinline__ void add_sent(const Windows& to, int64_t bytes_of_lane) {
  const auto bytes = static_cast<unsigned long long>(warp_sum(static_cast<long long>(bytes_of_lane)));
  if (threadIdx.x % 32 == 0 && bytes > 0) atomicAdd(to.sent, bytes);
}

// The rows of tokens and the places that copies of them go to, as PushRows says (ops/dispatch/dispatch.h).
struct Push {
  const char* x;
  const int32_t *dest_TJ, *row_TJ;
  int64_t num_tokens, row_bytes;
  int num_dest, etp;

  __device__ int copies() const { return num_dest * etp; }
  // The place of a copy of token t; null where it goes nowhere. Adds what leaves this rank to sent.
  __device__ char* place(const Windows& to, int64_t t, int copy, int64_t& sent) const {
    const int64_t i = t * num_dest + copy / etp;
    if (dest_TJ[i] < 0) return nullptr;
    const int q = dest_TJ[i] * etp + copy % etp;
    if (q != to.rank) sent += row_bytes;
    return to.array(q) + row_TJ[i] * row_bytes;
  }
};

// A row is read once. A lane holds the place of one of its copies. The places of the next row are looked up while this
// one is on its way.
template <class Word>
__global__ void __launch_bounds__(kThreads, 1) push_rows_kernel(Push a, Windows to) {
  const int lane = threadIdx.x % 32, copies = a.copies();
  const int64_t words = a.row_bytes / static_cast<int64_t>(sizeof(Word)), stride = int64_t{gridDim.x} * (kThreads / 32);
  int64_t sent = 0;
  const auto look_up = [&](int64_t t, int first) {
    return t < a.num_tokens && first + lane < copies ? a.place(to, t, first + lane, sent) : nullptr;
  };
  int64_t t = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  char* next = look_up(t, 0);
  for (; t < a.num_tokens; t += stride) {
    const Word* x = reinterpret_cast<const Word*>(a.x + t * a.row_bytes);
    for (int first = 0; first < copies; first += 32) {
      char* const place = next;
      const uint32_t places = __ballot_sync(kAllLanes, place != nullptr);
      for (int64_t at = lane; at - lane < words; at += 32 * kAtOnce) {
        Word word[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) word[i] = fetch_word(x + at + 32 * i, at + 32 * i < words);
        if (at == lane) next = first + 32 < copies ? look_up(t, first + 32) : look_up(t + stride, 0);
        for (uint32_t left = places; left != 0; left &= left - 1) {
          Word* copy = reinterpret_cast<Word*>(
              __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(place), __ffs(left) - 1));
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            if (at + 32 * i < words) copy[at + 32 * i] = word[i];
        }
      }
    }
  }
  add_sent(to, sent);
}

template <class Word>
void launch_push_rows(Stream& s, const Push& a, const Windows& to) {
  Grid(s, a.num_tokens, kThreads).launch(push_rows_kernel<Word>, a, to);
}

// A block owns a rank.
__global__ void __launch_bounds__(kThreads, 1) push_to_all_kernel(const char* x, int64_t num_bytes, Windows to) {
  char* array = to.array(blockIdx.x) + to.rank * num_bytes;
  for (int64_t i = threadIdx.x; i < num_bytes; i += kThreads) array[i] = x[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(to.sent, (to.num_ranks - 1) * num_bytes);
}

// Rows that return to the ranks that they came from.
struct Return {
  const int32_t *pair_row_NK, *arrive_W1, *back_W;
  const float* weight_NK;  // may be null
  int top_k;
};

// The rank that row n came from. All lanes of the warp call it.
__device__ int source_of(const Return& a, const Windows& to, int64_t n) {
  int source = 0;
  for (int first = 0; first < to.num_ranks; first += 32) {
    const int q = first + static_cast<int>(threadIdx.x % 32);
    const bool is_before = q < to.num_ranks && a.arrive_W1[q + 1] <= n;
    source += __popc(__ballot_sync(kAllLanes, is_before));
  }
  return source;
}

// The pairs of a row of N, by lane: the rows of y, -1 past the last one, and their weights.
struct Pairs {
  int32_t row;
  float weight;
};

__device__ Pairs pairs_of(const Return& a, int64_t n, int first) {
  const int k = first + static_cast<int>(threadIdx.x % 32);
  if (k >= a.top_k) return {-1, 0.0f};
  const int64_t i = n * a.top_k + k;
  return {a.pair_row_NK[i], a.weight_NK ? a.weight_NK[i] : 1.0f};
}

// The row that is returned as the i-th. The rows of this rank are spread evenly among those of other ranks, so that
// the memory and the links work at the same time. Those of others begin with the next rank's: no rank is the first of
// all others.
__device__ int64_t returned_row(const Return& a, const Windows& to, int64_t i) {
  const auto num_rows = static_cast<uint32_t>(a.arrive_W1[to.num_ranks]);
  const int64_t own_begin = a.arrive_W1[to.rank], own_end = a.arrive_W1[to.rank + 1], num_own = own_end - own_begin;
  const int64_t own = quotient(i * num_own, num_rows);  // those of this rank among the first i
  if (quotient((i + 1) * num_own, num_rows) > own) return own_begin + own;
  const int64_t other = i - own, behind = num_rows - own_end;
  return other < behind ? own_end + other : other - behind;
}

// Pieces of a few rows of y are on their way at once; they are added in the order of k.
template <class T, int kNum>
__global__ void __launch_bounds__(kSumThreads, 1) return_sums_kernel(const T* y, int64_t width, Return a, Windows to) {
  constexpr int kWarps = kSumThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t num_rows = a.arrive_W1[to.num_ranks], row_bytes = width * static_cast<int64_t>(sizeof(T));
  int64_t sent = 0;
  const int64_t first_turn = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (int64_t turn = first_turn; turn < num_rows; turn += int64_t{gridDim.x} * kWarps) {
    const int64_t n = returned_row(a, to, turn);
    const int source = source_of(a, to, n);
    T* out = reinterpret_cast<T*>(to.array(source) + (a.back_W[source] + n - a.arrive_W1[source]) * row_bytes);
    if (lane == 0 && source != to.rank) sent += row_bytes;
    for (int64_t at = lane * kNum; at - lane * kNum < width; at += 32 * kNum * kSumsAtOnce) {
      float sum[kSumsAtOnce][kNum] = {};
      for (int first = 0; first < a.top_k; first += 32) {
        const Pairs pairs = pairs_of(a, n, first);
        for (uint32_t left = __ballot_sync(kAllLanes, pairs.row >= 0); left != 0;) {
          Raw<T, kNum> raw[kRowsAtOnce][kSumsAtOnce];
          float weight[kRowsAtOnce];
          const int there = min(__popc(left), kRowsAtOnce);  // the same in all lanes
#pragma unroll
          for (int r = 0; r < kRowsAtOnce; ++r, left &= left - 1) {
            const int from = left != 0 ? __ffs(left) - 1 : 0;
            const int64_t row = __shfl_sync(kAllLanes, pairs.row, from);
            weight[r] = __shfl_sync(kAllLanes, pairs.weight, from);
#pragma unroll
            for (int i = 0; i < kSumsAtOnce; ++i) {
              const int64_t column = at + 32 * kNum * i;
              raw[r][i] = fetch<kNum>(y + row * width + column, r < there && column < width);
            }
          }
#pragma unroll
          for (int r = 0; r < kRowsAtOnce; ++r) {
            if (r >= there) continue;
#pragma unroll
            for (int i = 0; i < kSumsAtOnce; ++i) {
              float x[kNum];
              unpack<T>(x, raw[r][i]);
#pragma unroll
              for (int j = 0; j < kNum; ++j) sum[i][j] += weight[r] * x[j];
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) {
        const int64_t column = at + 32 * kNum * i;
        if (column < width) store(out + column, sum[i]);
      }
    }
  }
  add_sent(to, sent);
}

// A warp owns a row, a lane some of its pairs.
__global__ void __launch_bounds__(kThreads, 1) return_pairs_kernel(const float* from, Return a, Windows to) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t num_rows = a.arrive_W1[to.num_ranks];
  int64_t sent = 0;
  for (int64_t n = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; n < num_rows; n += int64_t{gridDim.x} * kWarps) {
    const int source = source_of(a, to, n);
    float* out = reinterpret_cast<float*>(to.array(source)) + (a.back_W[source] + n - a.arrive_W1[source]) * a.top_k;
    for (int k = lane; k < a.top_k; k += 32) {
      const int32_t row = a.pair_row_NK[n * a.top_k + k];
      out[k] = row < 0 ? 0.0f : from[row];
      if (source != to.rank) sent += sizeof(float);
    }
  }
  add_sent(to, sent);
}

template <class Op>
Return return_of(const Op& a) {
  return {.pair_row_NK = a.pair_row_NK.template ptr<int32_t>(),
          .arrive_W1 = a.arrive_W1.template ptr<int32_t>(),
          .back_W = a.back_W.template ptr<int32_t>(),
          .weight_NK = nullptr,
          .top_k = narrow<int>(a.pair_row_NK.dim(1))};
}

}  // namespace

// The widest words that rows are made of and begin at. Windows begin at multiples of 16 bytes.
void push_rows(Stream& s, const PushRows& a) {
  const Push push{.x = static_cast<const char*>(a.x_TD.data),
                  .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                  .row_TJ = a.row_TJ.ptr<int32_t>(),
                  .num_tokens = a.x_TD.dim(0),
                  .row_bytes = a.x_TD.dim(1) * size_of(a.x_TD.dtype),
                  .num_dest = narrow<int>(a.dest_TJ.dim(1)),
                  .etp = narrow<int>(a.etp)};
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  const auto places = reinterpret_cast<uintptr_t>(push.x) | static_cast<uintptr_t>(push.row_bytes | a.offset);
  if (places % 16 != 0) note_odd_rows(s, "push_rows", a.x_TD.dtype, a.x_TD.dim(1));
  if (places % 16 == 0)
    launch_push_rows<uint4>(s, push, to);
  else if (places % 4 == 0)
    launch_push_rows<uint32_t>(s, push, to);
  else if (places % 2 == 0)
    launch_push_rows<uint16_t>(s, push, to);
  else
    launch_push_rows<uint8_t>(s, push, to);
  check_launch("push_rows");
}

void push_to_all(Stream& s, const PushToAll& a) {
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  push_to_all_kernel<<<to.num_ranks, kThreads, 0, cuda_stream(s)>>>(static_cast<const char*>(a.x_M.data),
                                                                    a.x_M.num_bytes(), to);
  check_launch("push_to_all");
}

void return_sums(Stream& s, const ReturnSums& a) {
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  Return back = return_of(a);
  if (!a.weight_NK.empty()) back.weight_NK = a.weight_NK.ptr<float>();
  const int64_t width = a.y_RD.dim(1);
  const Grid grid(s, a.pair_row_NK.dim(0), kSumThreads);
  with_float_type(a.y_RD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* y = a.y_RD.ptr<T>();
    if (rows_are_aligned(width, sizeof(T), y)) {
      grid.launch(return_sums_kernel<T, kPerVector<T>>, y, width, back, to);
    } else {
      note_odd_rows(s, "return_sums", a.y_RD.dtype, width);
      grid.launch(return_sums_kernel<T, 1>, y, width, back, to);
    }
  });
  check_launch("return_sums");
}

void return_pairs(Stream& s, const ReturnPairs& a) {
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  Grid(s, a.pair_row_NK.dim(0), kThreads)
      .launch(return_pairs_kernel, static_cast<const float*>(a.from_R.ptr<float>()), return_of(a), to);
  check_launch("return_pairs");
}

}  // namespace moebius::cuda
