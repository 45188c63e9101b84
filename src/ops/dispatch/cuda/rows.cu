// Copies and sums rows into windows. A warp owns a row. No kernel waits for another rank: rounds do
// (comm/peer_window.h).
#include "device/fallback_kernels.h"
#include "ops/cuda/early_launch.h"
#include "ops/dispatch/cuda/contiguous_copies.h"
#include "ops/dispatch/cuda/push_rows.h"
#include "ops/dispatch/cuda/return_sums.h"
#include "ops/dispatch/cuda/windows.h"
#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 1024;    // threads of a block
constexpr int kSumThreads = 512;  // threads of a block that sums rows, which need more registers
constexpr int kAtOnce = 8;        // words of a row that a thread loads before it stores them
constexpr int kSumsAtOnce = 4;    // words of each row that a thread loads before it adds them
constexpr int kRowsAtOnce = 4;    // rows that a thread loads before it adds them
constexpr int kPairsAtOnce = 4;   // pairs that a thread loads before it returns them

// A row is read once. A lane holds the place of one of its copies. The places of the next row are looked up while this
// one is copied.
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

// A warp owns a token, and reads its row once.
template <class Word>
__global__ void __launch_bounds__(kThreads, 1) spread_rows_kernel(Word* array, const Word* x, const int32_t* row_TJ,
                                                                  int64_t num_tokens, int64_t words, int num_dest) {
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t t = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; t < num_tokens; t += stride) {
    for (int64_t at = lane; at < words; at += 32 * kAtOnce) {
      Word word[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) word[i] = fetch_word(x + t * words + at + 32 * i, at + 32 * i < words);
      for (int j = 0; j < num_dest; ++j) {
        const int64_t row = row_TJ[t * num_dest + j];
        if (row < 0) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (at + 32 * i < words) array[row * words + at + 32 * i] = word[i];
      }
    }
  }
}

template <class Word>
void launch_spread_rows(Stream& s, const SpreadRows& a) {
  const int64_t T = a.x_TD.dim(0), words = a.x_TD.num_bytes() / T / static_cast<int64_t>(sizeof(Word));
  Grid(s, T, kThreads)
      .launch(spread_rows_kernel<Word>, static_cast<Word*>(a.array_SD.data), static_cast<const Word*>(a.x_TD.data),
              static_cast<const int32_t*>(a.row_TJ.ptr<int32_t>()), T, words, narrow<int>(a.row_TJ.dim(1)));
}

// A block owns a rank.
__global__ void __launch_bounds__(kThreads, 1) push_to_all_kernel(const char* x, int64_t num_bytes, Windows to) {
  let_next_start();
  wait_for_inputs();
  char* array = to.array(blockIdx.x) + to.rank * num_bytes;
  for (int64_t i = threadIdx.x; i < num_bytes; i += kThreads) array[i] = x[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(to.sent, (to.num_ranks - 1) * num_bytes);
}

// A pair of a row of N, one in each lane: the row of y, -1 past the last pair, and its weight.
struct Pairs {
  int32_t row;
  float weight;
};

__device__ Pairs pairs_of(const Return& a, int64_t n, int first) {
  const int k = first + static_cast<int>(threadIdx.x % 32);
  if (k >= a.num_pairs) return {-1, 0.0f};
  const int64_t i = n * a.num_pairs + k;
  return {a.pair_row_NL[i], a.weight_NL ? a.weight_NL[i] : 1.0f};
}

// Pieces of a few rows of y are loaded at once. They are added in the order of the pairs.
template <class T, int kNum>
__global__ void __launch_bounds__(kSumThreads, 1) return_sums_kernel(const T* y, int64_t width, Return a, Windows to) {
  constexpr int kWarps = kSumThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  const ReturnOrder order(a, to);
  int64_t sent = 0;
  for (uint32_t turn = blockIdx.x * kWarps + threadIdx.x / 32; turn < order.num_rows(); turn += gridDim.x * kWarps) {
    const int64_t n = order.row(turn);
    const int source = source_of(a, to, n);
    T* out = reinterpret_cast<T*>(to.array(source) + (a.back_W[source] + n - a.arrive_W1[source]) * row_bytes);
    if (lane == 0 && source != to.rank) sent += row_bytes;
    for (int64_t at = lane * kNum; at - lane * kNum < width; at += 32 * kNum * kSumsAtOnce) {
      float sum[kSumsAtOnce][kNum] = {};
      for (int first = 0; first < a.num_pairs; first += 32) {
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

// Returns the rank that row n came from.
__device__ __forceinline__ int source_of_row(const Return& a, int num_ranks, int64_t n) {
  int first = 0, last = num_ranks - 1;  // the first rank whose rows end after n
  while (first < last) {
    const int middle = (first + last) / 2;
    if (a.arrive_W1[middle + 1] > n)
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

// A thread owns some pairs, and loads kPairsAtOnce of them together.
__global__ void __launch_bounds__(kThreads, 1) return_pairs_kernel(const float* from, Return a, Windows to) {
  const int64_t num_rows = a.arrive_W1[to.num_ranks], num_pairs = num_rows * a.num_pairs;
  const int64_t stride = int64_t{gridDim.x} * kThreads, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t first = thread; first < num_pairs; first += stride * kPairsAtOnce) {
    int32_t row[kPairsAtOnce];
    float x[kPairsAtOnce];
#pragma unroll
    for (int i = 0; i < kPairsAtOnce; ++i)
      row[i] = first + i * stride < num_pairs ? a.pair_row_NL[first + i * stride] : -1;
#pragma unroll
    for (int i = 0; i < kPairsAtOnce; ++i) x[i] = row[i] < 0 ? 0.0f : from[row[i]];
#pragma unroll
    for (int i = 0; i < kPairsAtOnce; ++i) {
      const int64_t pair = first + i * stride;
      if (pair >= num_pairs) break;
      const int64_t n = quotient(pair, a.num_pairs);
      const int source = source_of_row(a, to.num_ranks, n);
      const int64_t there = int64_t{a.back_W[source]} - a.arrive_W1[source];  // the rows of a source are neighbours
      reinterpret_cast<float*>(to.array(source))[there * a.num_pairs + pair] = x[i];
    }
  }
  if (thread != 0) return;
  const int64_t rows_of_others = num_rows - (a.arrive_W1[to.rank + 1] - a.arrive_W1[to.rank]);
  atomicAdd(to.sent, static_cast<unsigned long long>(rows_of_others * a.num_pairs * sizeof(float)));
}

}  // namespace

// Copies rows in the widest words that divide their length and the places where they begin. Windows begin at
// multiples of 16 bytes.
void push_rows(Stream& s, const PushRows& a) {
  if (!a.windows.empty() && copy_contiguous(s, a)) return;
  const Push push{.x = static_cast<const char*>(a.x_TD.data),
                  .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                  .row_TJ = a.row_TJ.ptr<int32_t>(),
                  .num_tokens = a.x_TD.dim(0),
                  .row_bytes = a.x_TD.dim(1) * size_of(a.x_TD.dtype),
                  .num_dest = narrow<int>(a.dest_TJ.dim(1)),
                  .etp = narrow<int>(a.etp),
                  .of = a.of};
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  const auto places = reinterpret_cast<uintptr_t>(push.x) | static_cast<uintptr_t>(push.row_bytes | a.offset);
  const int blocks = limited_blocks(s, gpu_limits(s).num_multiprocessors);
  const bool can_use_engine = places % 16 == 0 && uses_hopper_kernels(s) && push.row_bytes >= kMinBytesByEngine &&
                              push.copies() <= kMaxCopiesByEngine;
  if (can_use_engine && blocks >= kMinBlocksByEngine && blocks <= kMaxBlocksByEngine)
    return push_rows_by_engine(s, push, to);
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

void spread_rows(Stream& s, const SpreadRows& a) {
  const auto places = reinterpret_cast<uintptr_t>(a.array_SD.data) | reinterpret_cast<uintptr_t>(a.x_TD.data) |
                      static_cast<uintptr_t>(a.x_TD.dim(1) * size_of(a.x_TD.dtype));
  if (places % 16 != 0) note_odd_rows(s, "spread_rows", a.x_TD.dtype, a.x_TD.dim(1));
  if (places % 16 == 0)
    launch_spread_rows<uint4>(s, a);
  else if (places % 4 == 0)
    launch_spread_rows<uint32_t>(s, a);
  else if (places % 2 == 0)
    launch_spread_rows<uint16_t>(s, a);
  else
    launch_spread_rows<uint8_t>(s, a);
  check_launch("spread_rows");
}

void push_to_all(Stream& s, const PushToAll& a) {
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  const LaunchShape how{.blocks = static_cast<unsigned>(to.num_ranks), .threads = kThreads};
  launch_kernel(s, /*early=*/true, how, push_to_all_kernel, static_cast<const char*>(a.x_M.data), a.x_M.num_bytes(),
                to);
  check_launch("push_to_all");
}

void return_sums(Stream& s, const ReturnSums& a) {
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  Return back = return_of(a);
  if (!a.weight_NL.empty()) back.weight_NL = a.weight_NL.ptr<float>();
  back.of = a.of;
  const int64_t width = a.y_RD.dim(1);
  const bool is_aligned = rows_are_aligned(width, size_of(a.y_RD.dtype), a.y_RD.data) && a.offset % 16 == 0;
  if (is_aligned && uses_hopper_kernels(s) && back.num_pairs <= kMaxPairsPipelined)
    return pipelined_sums(s, a.y_RD, a.pair_row_NL.dim(0), back, to);
  if (!is_aligned) note_odd_rows(s, "return_sums", a.y_RD.dtype, width);
  const Grid grid(s, a.pair_row_NL.dim(0), kSumThreads);
  with_float_type(a.y_RD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* y = a.y_RD.ptr<T>();
    if (is_aligned)
      grid.launch(return_sums_kernel<T, kPerVector<T>>, y, width, back, to);
    else
      grid.launch(return_sums_kernel<T, 1>, y, width, back, to);
  });
  check_launch("return_sums");
}

void return_pairs(Stream& s, const ReturnPairs& a) {
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  Grid(s, div_ceil(a.pair_row_NL.numel(), 32), kThreads)  // a warp owns 32 pairs at a time
      .launch(return_pairs_kernel, static_cast<const float*>(a.from_R.ptr<float>()), return_of(a), to);
  check_launch("return_pairs");
}

}  // namespace moebius::cuda
