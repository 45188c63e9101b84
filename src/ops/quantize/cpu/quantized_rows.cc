#include "ops/quantize/quantized_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/narrow_float.h"
#include "ops/cpu/vector.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/quantize/scales.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kBlock = 128, kRowsAtOnce = 16;

// Calls fn(row, the row's bytes, the elements [begin, end), their scale's bytes) for each block of the rows that
// offsets name.
template <class F>
void for_blocks(Stream& s, const Tensor& rows_TB, const Tensor& offsets_e1, int64_t D, F fn) {
  auto* all = static_cast<uint8_t*>(rows_TB.data);
  const int32_t* offsets = offsets_e1.empty() ? nullptr : offsets_e1.ptr<int32_t>();
  const int64_t begin_row = offsets ? offsets[0] : 0;
  const int64_t end_row = offsets ? offsets[offsets_e1.numel() - 1] : rows_TB.dim(0);
  parallel_rows(s.pool(), end_row - begin_row, kRowsAtOnce, [&](int64_t first, int64_t last) {
    for (int64_t t = begin_row + first; t < begin_row + last; ++t) {
      uint8_t* row = all + t * rows_TB.dim(1);
      for (int64_t begin = 0; begin < D; begin += kBlock)
        fn(t, row, begin, std::min(D, begin + kBlock), row + D + begin / kBlock * int64_t{sizeof(float)});
    }
  });
}

}  // namespace

void pack_quantized_rows(Stream& s, const PackQuantizedRows& a) {
  const int64_t D = a.x_TD.dim(1);
  with_float_type(a.x_TD.dtype, [&]<class T>(T) {
    const T* x = a.x_TD.ptr<T>();
    for_blocks(s, a.rows_TB, a.offsets_e1, D,
               [&](int64_t t, uint8_t* row, int64_t begin, int64_t end, uint8_t* scale_bytes) {
                 float values[kBlock];
                 uint32_t largest = 0;
                 for (int64_t j = begin; j < end; ++j) {
                   values[j - begin] = to_f32(x[t * D + j]);
                   largest = std::max(largest, std::bit_cast<uint32_t>(values[j - begin]) & 0x7fffffffu);
                 }
                 const float scale = power_of_two_scale(largest, top_exponent(DType::f8_e4m3)), inverse = 1.0f / scale;
                 std::memcpy(scale_bytes, &scale, sizeof scale);
                 for (int64_t j = begin; j < end; ++j) row[j] = to_f8_e4m3(values[j - begin] * inverse).bits;
               });
  });
}

void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a) {
  const int64_t D = a.x_TD.dim(1);
  with_float_type(a.x_TD.dtype, [&]<class T>(T) {
    T* x = a.x_TD.ptr<T>();
    for_blocks(s, a.rows_TB, a.offsets_e1, D,
               [&](int64_t t, const uint8_t* row, int64_t begin, int64_t end, const uint8_t* from) {
                 float scale;
                 std::memcpy(&scale, from, sizeof scale);
                 for (int64_t j = begin; j < end; ++j) x[t * D + j] = from_f32<T>(kF8E4m3Values[row[j]] * scale);
               });
  });
}

}  // namespace moebius::cpu
