#include "ops/quantize/quantized_rows.h"

#include <algorithm>

#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

// Rows in bytes, each of which is first 0xff.
Array packed(Stream& s, Array x) {
  const int64_t T = x.tensor().dim(0), bytes = quantized_row_bytes(x.tensor().dim(1));
  Array rows = Array::poisoned({T, bytes / 4}, DType::i32);
  Tensor rows_TB = rows.tensor();
  rows_TB.shape = {T, bytes};
  rows_TB.dtype = DType::u8;
  pack_quantized_rows(s, {.rows_TB = rows_TB, .x_TD = x.tensor()});
  synchronize(s);  // x ends here
  return rows;
}

Values unpacked(Stream& s, Array rows, int64_t D, DType dtype) {
  Tensor rows_TB = rows.tensor();
  rows_TB.shape = {rows_TB.dim(0), quantized_row_bytes(D)};
  rows_TB.dtype = DType::u8;
  Array x = Array::poisoned({rows_TB.dim(0), D}, dtype);
  unpack_quantized_rows(s, {.x_TD = x.tensor(), .rows_TB = rows_TB});
  return x.values();
}

// Values of all sizes, a block of zeros, a NaN and an infinity.
Array numbers(int64_t T, int64_t D, DType dtype) {
  Values v = Array::normal({T, D}, DType::f32, 9).values();
  for (size_t i = 0; i < v.size(); ++i) v[i] *= std::ldexp(1.0, static_cast<int>(i % 41) - 20);
  for (int64_t j = 0; j < std::min<int64_t>(D, 128); ++j) v[D + j] = 0;
  v[2 * D] = std::nan("");
  v[3 * D + D - 1] = std::numeric_limits<double>::infinity();
  return Array::of({T, D}, dtype, v);
}

// Elements and scales equal those of quantize() for any width on every device.
TEST(QuantizedRows, HaveTheBytesOfQuantize) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t D : {1, 12, 128, 130, 301, 2048}) {
        SCOPED_TRACE(D);
        const int64_t T = 37, bytes = quantized_row_bytes(D), blocks = div_ceil(D, int64_t{128});
        Array x = numbers(T, D, dtype);
        const QuantisedArray expected({T, D}, DType::f8_e4m3, ScaleLayout::row_blocks);
        quantize(s, {.q = expected.operand(), .x_RC = x.tensor()});
        const std::vector<unsigned char> got = packed(s, x).bytes(), data = expected.data();
        ASSERT_EQ(std::ssize(got), T * bytes);
        for (int64_t t = 0; t < T; ++t) {
          EXPECT_TRUE(std::equal(data.begin() + t * D, data.begin() + (t + 1) * D, got.begin() + t * bytes)) << t;
          for (int64_t b = 0; b < blocks; ++b) {
            float scale;
            std::memcpy(&scale, got.data() + t * bytes + D + 4 * b, sizeof scale);
            const float want = expected.scale(static_cast<size_t>(t * blocks + b));
            EXPECT_TRUE(scale == want || (std::isnan(scale) && std::isnan(want))) << t << " " << b;
          }
        }
      }
    }
  });
}

TEST(QuantizedRows, HaveTheValuesOfDequantize) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t D : {12, 130, 256}) {
        SCOPED_TRACE(D);
        Array x = Array::normal({5, D}, dtype, 3, 100);
        const QuantisedArray q({5, D}, DType::f8_e4m3, ScaleLayout::row_blocks);
        quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
        Array values = Array::poisoned({5, D}, dtype);
        dequantize(s, {.x = values.tensor(), .q = q.operand()});
        EXPECT_EQ(unpacked(s, packed(s, x), D, dtype), values.values());
      }
    }
  });
}

// Rows outside of the offsets keep their bytes, and are not read. Those inside are as without offsets.
TEST(QuantizedRows, OffsetsNameTheRows) {
  testing::on_each_device([](Stream& s) {
    for (const int64_t D : {12, 130, 256}) {
      for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, 7}, {3, 150}, {129, 290}, {5, 5}, {300, 300}}) {
        SCOPED_TRACE(fmt::format("{} columns, rows {} to {}", D, first, last));
        constexpr int64_t kRows = 300;
        const auto row = [](int64_t r) { return static_cast<int32_t>(r); };
        Array offsets = Array::of_ints({3}, {row(first), row((first + last) / 2), row(last)});
        Array x = numbers(kRows, D, DType::bf16);
        const int64_t bytes = quantized_row_bytes(D);
        const auto as_rows = [&](Array& a) {
          Tensor rows = a.tensor();
          rows.shape = {kRows, bytes};
          rows.dtype = DType::u8;
          return rows;
        };
        Array all = packed(s, x), some = Array::poisoned({kRows, bytes / 4}, DType::i32);
        pack_quantized_rows(s, {.rows_TB = as_rows(some), .x_TD = x.tensor(), .offsets_e1 = offsets.tensor()});
        Array values = Array::poisoned({kRows, D}, DType::bf16), wanted = Array::poisoned({kRows, D}, DType::bf16);
        const auto poison = values.bytes();
        unpack_quantized_rows(s, {.x_TD = values.tensor(), .rows_TB = as_rows(all), .offsets_e1 = offsets.tensor()});
        unpack_quantized_rows(s, {.x_TD = wanted.tensor(), .rows_TB = as_rows(all)});
        const auto got = some.bytes(), want = all.bytes(), got_x = values.bytes(), want_x = wanted.bytes();
        // The padding of a row is not written.
        const int64_t written = D + 4 * div_ceil(D, int64_t{128});
        for (int64_t t = 0; t < kRows; ++t) {
          const bool is_named = t >= first && t < last;
          for (int64_t b = 0; b < written; ++b)
            ASSERT_EQ(got[t * bytes + b], is_named ? want[t * bytes + b] : 0xff) << "row " << t << " byte " << b;
          for (int64_t b = 0; b < 2 * D; ++b)
            ASSERT_EQ(got_x[t * 2 * D + b], is_named ? want_x[t * 2 * D + b] : poison[t * 2 * D + b]) << "row " << t;
        }
      }
    }
  });
}

TEST(QuantizedRows, AnyTeamHasTheSameBits) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array x = numbers(50, 300, DType::bf16), rows = packed(s, x);
    return std::vector<Array>{rows, Array::of({50, 300}, DType::f32, unpacked(s, rows, 300, DType::f32))};
  });
}

TEST(QuantizedRows, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 8}, DType::f32), rows({4, 8}, DType::i32);
  EXPECT_EQ(quantized_row_bytes(8), 16);
  EXPECT_EQ(quantized_row_bytes(2048), 2048 + 64);
  EXPECT_EQ(testing::error_of([&] { pack_quantized_rows(s, {.rows_TB = rows.tensor(), .x_TD = rows.tensor()}); }),
            "pack_quantized_rows: x must be an f32 or bf16 matrix; got i32[4, 8]");
  EXPECT_EQ(testing::error_of([&] { unpack_quantized_rows(s, {.x_TD = x.tensor(), .rows_TB = rows.tensor()}); }),
            "unpack_quantized_rows: rows must be u8[4, 16]; got i32[4, 8]");
}

TEST(QuantizedRows, NullDeviceCounts) {
  const auto null = [](Shape shape, DType dtype) { return testing::null_tensor(shape, dtype); };
  const Cost cost = testing::cost_on_null([&](Stream& s) {
    pack_quantized_rows(s, {.rows_TB = null({4, 272}, DType::u8), .x_TD = null({4, 256}, DType::bf16)});
    unpack_quantized_rows(s, {.x_TD = null({4, 256}, DType::bf16), .rows_TB = null({4, 272}, DType::u8)});
  });
  EXPECT_EQ(cost.flops, 3 * 4 * 256);
  EXPECT_EQ(cost.bytes, 2 * 4 * (256 * 2 + 272));
}

}  // namespace
}  // namespace moebius
