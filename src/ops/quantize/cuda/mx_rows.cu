// A warp has a part of a row, 128 columns of it; or a block of rows, in 128 columns of bf16 or 64 of f32.
#include "ops/quantize/mx_rows.h"

#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/mx_rows_math.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kOfLane = 4;  // columns of a row that a lane has
template <class T>
constexpr int kColumns = 8 / static_cast<int>(sizeof(T));  // and of a block of rows

struct Rows {
  const int32_t *offsets, *token;
  int64_t R, C;
  int64_t num_units, across;  // what warps have, in all and side by side
  int num_experts;
};

__device__ __forceinline__ int64_t unit_of_warp() {
  return int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / 32;
}

// Loads kNum neighbours, of which the first `valid` exist; kWhole: all do, and they are aligned.
template <bool kWhole, int kNum, class T>
__device__ __forceinline__ Raw<T, kNum> fetch_some(const T* x, int64_t valid) {
  if constexpr (kWhole) return fetch<kNum>(x, valid > 0);
  Raw<T, kNum> raw = {};
#pragma unroll
  for (int j = 0; j < kNum; ++j)
    if (j < valid) reinterpret_cast<T*>(&raw)[j] = x[j];
  return raw;
}
template <bool kWhole, int kNum, class T>
__device__ __forceinline__ void store_some(T* y, const float (&v)[kNum], int64_t valid) {
  if constexpr (kWhole) {
    if (valid > 0) store(y, v);
  } else {
#pragma unroll
    for (int j = 0; j < kNum; ++j)
      if (j < valid) set(y[j], v[j]);
  }
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) columns_kernel(T* y, const T* x, const __grid_constant__ Rows a) {
  const int64_t unit = unit_of_warp(), row = unit / a.across;
  if (unit >= a.num_units || (a.offsets && row >= a.offsets[a.num_experts])) return;
  const int64_t col = ((unit - row * a.across) * 32 + static_cast<int>(threadIdx.x) % 32) * kOfLane;
  float v[kOfLane];
  unpack<T>(v, fetch_some<kWhole, kOfLane>(x + row * a.C + col, a.C - col));
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) largest = max(largest, magnitude_bits(v[j]));
#pragma unroll
  for (int step = 1; step < kMxBlock / kOfLane; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  const MxScale scale = mx_scale(largest);
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) v[j] = mx_value(v[j], scale);
  store_some<kWhole>(y + row * a.C + col, v, a.C - col);
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) rows_kernel(T* y, const T* x, const __grid_constant__ Rows a) {
  constexpr int kOwn = kColumns<T>;
  const int64_t unit = unit_of_warp(), block = unit / a.across;
  if (unit >= a.num_units) return;
  const MxRows rows = mx_rows_of_block(a.offsets, a.num_experts, a.R, block);
  const int64_t col = ((unit - block * a.across) * 32 + static_cast<int>(threadIdx.x) % 32) * kOwn;
  Raw<T, kOwn> raw[kMxBlock];
#pragma unroll
  for (int j = 0; j < kMxBlock; ++j) {
    const int64_t r = rows.begin + j, valid = j < rows.count ? a.C - col : 0;
    raw[j] = fetch_some<kWhole, kOwn>(x + (j < rows.count && a.token ? a.token[r] : r) * a.C + col, valid);
  }
  uint32_t largest[kOwn] = {};
#pragma unroll
  for (int j = 0; j < kMxBlock; ++j) {
    float v[kOwn];
    unpack<T>(v, raw[j]);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) largest[c] = max(largest[c], magnitude_bits(v[c]));
  }
  MxScale scales[kOwn];
#pragma unroll
  for (int c = 0; c < kOwn; ++c) scales[c] = mx_scale(largest[c]);
#pragma unroll
  for (int j = 0; j < kMxBlock; ++j) {
    float v[kOwn];
    unpack<T>(v, raw[j]);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) v[c] = mx_value(v[c], scales[c]);
    store_some<kWhole>(y + (rows.begin + j) * a.C + col, v, j < rows.count ? a.C - col : 0);
  }
}

}  // namespace

void mx_round(Stream& s, const MxRound& a) {
  const auto ints = [](const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); };
  Rows rows{.offsets = ints(a.offsets_e1),
            .token = ints(a.token_R),
            .R = a.y_RC.dim(0),
            .C = a.x_NC.dim(1),
            .num_experts = a.offsets_e1.empty() ? 0 : narrow<int>(a.offsets_e1.numel() - 1)};
  const int of_block = a.x_NC.dtype == DType::bf16 ? kColumns<bf16> : kColumns<float>;
  rows.across = div_ceil(rows.C, int64_t{32} * (a.blocks_of_rows ? of_block : kOfLane));
  rows.num_units = rows.across * (a.blocks_of_rows ? num_mx_row_blocks(rows.R, rows.num_experts) : rows.R);
  const auto is_aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; };
  const bool is_whole = rows.C % kOfLane == 0 && is_aligned(a.x_NC) && is_aligned(a.y_RC);
  with_float_type(a.x_NC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = a.blocks_of_rows ? (is_whole ? rows_kernel<T, true> : rows_kernel<T, false>)
                                         : (is_whole ? columns_kernel<T, true> : columns_kernel<T, false>);
    kernel<<<num_blocks(rows.num_units, kWarps), kThreads, 0, cuda_stream(s)>>>(a.y_RC.ptr<T>(), a.x_NC.ptr<T>(), rows);
  });
  check_launch("mx_round");
}

}  // namespace moebius::cuda
