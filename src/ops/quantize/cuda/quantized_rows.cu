// A warp owns a block of 128 elements of a row; a lane has four of them.
#include "ops/quantize/quantized_rows.h"

#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/quantize/scales.h"
#include "ops/quantize/sm90/quantize_tiles.h"

namespace moebius::cuda {
namespace {

constexpr int kBlock = 128, kThreads = 256, kWarps = kThreads / 32, kOfLane = 4;
static_assert(kOfLane * 32 == kBlock);

struct Packed {
  uint8_t* rows;
  int64_t num_rows, row_bytes, D, blocks;  // blocks of a row
  const int32_t* offsets;                  // null: all rows
  int64_t num_offsets;
};

struct Place {
  bool is_inside;
  int64_t row, col;  // col: of the lane's first element
  uint8_t* elements;
  uint8_t* scale;
};

__device__ __forceinline__ Place place_of(const Packed& p) {
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, row = at / p.blocks, block = at - row * p.blocks;
  const int64_t col = block * kBlock + threadIdx.x % 32 * kOfLane;
  uint8_t* bytes = p.rows + row * p.row_bytes;
  const bool is_named = !p.offsets || (row >= p.offsets[0] && row < p.offsets[p.num_offsets - 1]);
  return {.is_inside = row < p.num_rows && is_named,
          .row = row,
          .col = col,
          .elements = bytes + col,
          .scale = bytes + p.D + block * 4};
}

// kWhole: D is a multiple of four, and all rows begin where a lane's elements are one word. Then scales are
// aligned too.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) pack_kernel(Packed p, const T* x) {
  const Place t = place_of(p);
  if (!t.is_inside) return;
  const T* from = x + t.row * p.D + t.col;
  float v[kOfLane] = {};
  if constexpr (kWhole) {
    unpack<T>(v, fetch<kOfLane>(from, t.col < p.D));
  } else {
    for (int j = 0; j < kOfLane; ++j)
      if (t.col + j < p.D) v[j] = element(from[j]);
  }
  uint32_t m = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) m = max(m, __float_as_uint(v[j]) & 0x7fffffffu);
  for (int step = 1; step < 32; step *= 2) m = max(m, __shfl_xor_sync(~0u, m, step));
  const float scale = power_of_two_scale(m, top_exponent(DType::f8_e4m3)), inverse = 1.0f / scale;
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) word |= uint32_t{to_f8_e4m3(v[j] * inverse).bits} << 8 * j;
  if (threadIdx.x % 32 == 0) {
    const uint32_t bits = __float_as_uint(scale);
    for (int j = 0; j < 4; ++j) t.scale[j] = static_cast<uint8_t>(bits >> 8 * j);
  }
  if constexpr (kWhole) {
    if (t.col < p.D) *reinterpret_cast<uint32_t*>(t.elements) = word;
  } else {
    for (int j = 0; j < kOfLane; ++j)
      if (t.col + j < p.D) t.elements[j] = static_cast<uint8_t>(word >> 8 * j);
  }
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) unpack_kernel(T* x, Packed p) {
  const Place t = place_of(p);
  if (!t.is_inside || t.col >= p.D) return;
  uint32_t bits = 0;
  for (int j = 0; j < 4; ++j) bits |= uint32_t{t.scale[j]} << 8 * j;
  const float scale = __uint_as_float(bits);
  T* to = x + t.row * p.D + t.col;
  if constexpr (kWhole) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(t.elements);
    float v[kOfLane];
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) v[j] = narrow_float::f8_e4m3_value(word >> 8 * j & 255u) * scale;
    store(to, v);
  } else {
    for (int j = 0; j < kOfLane; ++j)
      if (t.col + j < p.D) set(to[j], narrow_float::f8_e4m3_value(t.elements[j]) * scale);
  }
}

// Calls run(Packed, blocks of the grid, zero of x's type, whether lanes have whole words).
template <class Run>
void launch(const Tensor& rows_TB, const Tensor& x_TD, const Tensor& offsets_e1, Run run) {
  const int64_t D = x_TD.dim(1), blocks = div_ceil(D, int64_t{kBlock});
  const Packed p{.rows = static_cast<uint8_t*>(rows_TB.data),
                 .num_rows = x_TD.dim(0),
                 .row_bytes = rows_TB.dim(1),
                 .D = D,
                 .blocks = blocks,
                 .offsets = offsets_e1.empty() ? nullptr : offsets_e1.ptr<int32_t>(),
                 .num_offsets = offsets_e1.numel()};
  const bool whole = D % kOfLane == 0 && reinterpret_cast<uintptr_t>(p.rows) % kOfLane == 0 &&
                     reinterpret_cast<uintptr_t>(x_TD.data) % 16 == 0;
  const int grid = num_blocks(p.num_rows * blocks, kWarps);
  with_float_type(x_TD.dtype, [&](auto zero) {
    whole ? run(p, grid, zero, std::true_type{}) : run(p, grid, zero, std::false_type{});
  });
}

}  // namespace

void pack_quantized_rows(Stream& s, const PackQuantizedRows& a) {
  if (uses_hopper_kernels(s) && sm90::takes_tiles(a)) return sm90::pack_tiles(s, a);
  launch(a.rows_TB, a.x_TD, a.offsets_e1, [&](const Packed& p, int grid, auto zero, auto whole) {
    using T = decltype(zero);
    pack_kernel<T, decltype(whole)::value><<<grid, kThreads, 0, cuda_stream(s)>>>(p, a.x_TD.ptr<T>());
  });
  check_launch("pack_quantized_rows");
}

void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a) {
  launch(a.rows_TB, a.x_TD, a.offsets_e1, [&](const Packed& p, int grid, auto zero, auto whole) {
    using T = decltype(zero);
    unpack_kernel<T, decltype(whole)::value><<<grid, kThreads, 0, cuda_stream(s)>>>(a.x_TD.ptr<T>(), p);
  });
  check_launch("unpack_quantized_rows");
}

}  // namespace moebius::cuda
