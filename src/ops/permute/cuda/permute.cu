#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/permute/permute.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, class Out>
struct Sum {
  Out* out;
  const T* y;
  const int32_t* pair_row;
  const float* weight;  // may be null
  int64_t num_vectors;
  uint32_t vectors_of_row;
  int num_pairs;  // of a token
  bool accumulate;
};

// A thread owns a vector of out, and loads kAtOnce rows at a time.
template <int kAtOnce, class T, class Out, int kNum>
__global__ void __launch_bounds__(kThreads, 4) combine_kernel(Sum<T, Out> a) {
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  let_next_start();
  wait_for_inputs();
  if (vector >= a.num_vectors) return;
  const int64_t t = quotient(vector, a.vectors_of_row);
  const int64_t column = (vector - t * a.vectors_of_row) * kNum, width = int64_t{a.vectors_of_row} * kNum;
  const int32_t* rows = a.pair_row + t * a.num_pairs;
  const float* weights = a.weight + t * a.num_pairs;
  float sum[kNum] = {};
  for (int first = 0; first < a.num_pairs; first += kAtOnce) {
    int32_t row[kAtOnce];
    float weight[kAtOnce];
    Raw<T, kNum> raw[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) row[k] = first + k < a.num_pairs ? rows[first + k] : -1;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      raw[k] = fetch<kNum>(a.y + row[k] * width + column, row[k] >= 0);
      weight[k] = a.weight && row[k] >= 0 ? weights[first + k] : 1.0f;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      float y[kNum];
      unpack<T>(y, raw[k]);
#pragma unroll
      for (int i = 0; i < kNum; ++i) sum[i] += weight[k] * y[i];
    }
  }
  if (a.accumulate) {
    float out[kNum];
    load(out, a.out + vector * kNum);
#pragma unroll
    for (int i = 0; i < kNum; ++i) sum[i] += out[i];
  }
  store(a.out + vector * kNum, sum);
}

// A thread owns a word of to.
template <class Word>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(Word* to, const Word* from, const int32_t* rows,
                                                               const int32_t* num_rows, uint32_t words_of_row) {
  const int64_t word = int64_t{blockIdx.x} * kThreads + threadIdx.x, r = quotient(word, words_of_row);
  if (r < *num_rows) to[word] = from[rows[r] * int64_t{words_of_row} + word - r * words_of_row];
}

template <class Word>
void launch_gather_rows(Stream& s, const GatherRows& a) {
  const int32_t* num_rows = a.offsets_E1.ptr<int32_t>() + a.offsets_E1.numel() - 1;
  const int64_t words = a.to_RD.num_bytes() / static_cast<int64_t>(sizeof(Word));
  gather_rows_kernel<<<num_blocks(words, kThreads), kThreads, 0, cuda_stream(s)>>>(
      static_cast<Word*>(a.to_RD.data), static_cast<const Word*>(a.from_ND.data), a.row_R.ptr<int32_t>(), num_rows,
      static_cast<uint32_t>(narrow<int>(words / a.to_RD.dim(0))));
}

__global__ void __launch_bounds__(kThreads)
    pairs_to_rows_kernel(float* to, const float* from, const int32_t* pair, const int32_t* num_rows) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  let_next_start();
  wait_for_inputs();
  if (r < *num_rows) to[r] = from[pair[r]];
}

__global__ void __launch_bounds__(kThreads)
    rows_to_pairs_kernel(float* to, const float* from, const int32_t* row, int64_t num_pairs) {
  const int64_t p = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (p < num_pairs) to[p] = row[p] < 0 ? 0.0f : from[row[p]];
}

template <int kNum, class T, class Out>
void launch_combine(Stream& s, const Sum<T, Out>& a) {
  const LaunchShape how{.blocks = static_cast<unsigned>(num_blocks(a.num_vectors, kThreads)), .threads = kThreads};
  const bool early = a.num_vectors <= kEarlyRows * a.vectors_of_row;
  if (a.num_pairs <= 2)
    launch_kernel(s, early, how, combine_kernel<2, T, Out, kNum>, a);
  else if (a.num_pairs <= 4)
    launch_kernel(s, early, how, combine_kernel<4, T, Out, kNum>, a);
  else
    launch_kernel(s, early, how, combine_kernel<8, T, Out, kNum>, a);
}

template <class T, class Out>
void combine_as(Stream& s, const Combine& a) {
  const int64_t width = a.out_TD.dim(1);
  constexpr int kNum = kPerVector<T>;
  Sum<T, Out> sum{.out = a.out_TD.ptr<Out>(),
                  .y = a.y_RD.ptr<T>(),
                  .pair_row = a.pair_row_TK.ptr<int32_t>(),
                  .weight = a.weight_TK.empty() ? nullptr : a.weight_TK.ptr<float>(),
                  .num_pairs = narrow<int>(a.pair_row_TK.dim(1)),
                  .accumulate = a.accumulate};
  const bool aligned = rows_are_aligned(width, std::min(sizeof(T), sizeof(Out)), sum.out, sum.y);
  if (!aligned) note_odd_rows(s, "combine", a.out_TD.dtype, width);
  sum.num_vectors = a.out_TD.numel() / (aligned ? kNum : 1);
  sum.vectors_of_row = static_cast<uint32_t>(narrow<int>(width / (aligned ? kNum : 1)));
  if (aligned)
    launch_combine<kNum>(s, sum);
  else
    launch_combine<1>(s, sum);
}

}  // namespace

void combine(Stream& s, const Combine& a) {
  with_float_type(a.y_RD.dtype, [&](auto y) {
    with_float_type(a.out_TD.dtype, [&](auto out) { combine_as<decltype(y), decltype(out)>(s, a); });
  });
  check_launch("combine");
}

// Copies with the widest words to which rows are aligned and of which they consist.
void gather_rows(Stream& s, const GatherRows& a) {
  const auto places = reinterpret_cast<uintptr_t>(a.to_RD.data) | reinterpret_cast<uintptr_t>(a.from_ND.data) |
                      static_cast<uintptr_t>(a.to_RD.dim(1) * size_of(a.to_RD.dtype));
  if (places % 16 != 0) note_odd_rows(s, "gather_rows", a.to_RD.dtype, a.to_RD.dim(1));
  if (places % 16 == 0)
    launch_gather_rows<uint4>(s, a);
  else if (places % 4 == 0)
    launch_gather_rows<uint32_t>(s, a);
  else if (places % 2 == 0)
    launch_gather_rows<uint16_t>(s, a);
  else
    launch_gather_rows<uint8_t>(s, a);
  check_launch("gather_rows");
}

void pairs_to_rows(Stream& s, const PairsToRows& a) {
  const int32_t* num_rows = a.offsets_E1.ptr<int32_t>() + a.offsets_E1.numel() - 1;
  const LaunchShape how{.blocks = static_cast<unsigned>(num_blocks(a.to_R.numel(), kThreads)), .threads = kThreads};
  const bool early = a.from_TK.dim(0) <= kEarlyRows;
  launch_kernel<float*, const float*, const int32_t*, const int32_t*>(s, early, how, pairs_to_rows_kernel,
                                                                      a.to_R.ptr<float>(), a.from_TK.ptr<float>(),
                                                                      a.row_pair_R.ptr<int32_t>(), num_rows);
  check_launch("pairs_to_rows");
}

void rows_to_pairs(Stream& s, const RowsToPairs& a) {
  const int64_t n = a.to_TK.numel();
  rows_to_pairs_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.to_TK.ptr<float>(), a.from_R.ptr<float>(), a.pair_row_TK.ptr<int32_t>(), n);
  check_launch("rows_to_pairs");
}

}  // namespace moebius::cuda
