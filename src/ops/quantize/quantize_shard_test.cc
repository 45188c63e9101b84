#include "ops/quantize/quantize_shard.h"

#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

constexpr DType kElement = DType::f8_e4m3;

// Quantises weights as ranks with these shares of their elements do.
void quantize_shares(Stream& s, const Operand& q, Array& x, DType rounded, const std::vector<int64_t>& cuts) {
  const Shape whole = q.data.shape;
  const auto W = std::ssize(cuts) - 1;
  const int64_t B = q.scales.numel(), before = 3;  // blocks of other weights
  Array bits = Array::of_ints({W, B + before}, std::vector<int32_t>(W * (B + before), 7));
  const Tensor bits_WB = bits.tensor(), all = x.tensor().view({whole.numel()});
  for (int64_t r = 0; r < W; ++r)
    block_magnitudes(s,
                     {.bits_B = bits_WB.view({bits_WB.numel()}).rows(r * (B + before) + before, (r + 1) * (B + before)),
                      .x_n = all.rows(cuts[r], cuts[r + 1]),
                      .whole = whole,
                      .first = cuts[r],
                      .rounded = rounded});
  for (int64_t r = 0; r < W; ++r)
    quantize_shard(s, {.q_n = q.data.view({whole.numel()}).rows(cuts[r], cuts[r + 1]),
                       .scales = q.scales,
                       .bits_WB = bits_WB,
                       .first_block = before,
                       .x_n = all.rows(cuts[r], cuts[r + 1]),
                       .whole = whole,
                       .first = cuts[r],
                       .rounded = rounded});
  synchronize(s);  // the bits end here
}

void expect_the_whole(Stream& s, Array x, DType rounded) {
  const Shape whole = x.tensor().shape;
  const QuantisedArray expected(whole, kElement, ScaleLayout::square_blocks);
  Array values = Array::of(whole, rounded, x.values());
  quantize(s, {.q = expected.operand(), .x_RC = values.tensor()});
  const int64_t n = whole.numel();
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{0, n}, {0, n / 3 + 1, n}, {0, 0, n / 7, n / 2 + 5, n}, {0, n, n}}) {
    const QuantisedArray shares(whole, kElement, ScaleLayout::square_blocks);
    quantize_shares(s, shares.operand(), x, rounded, cuts);
    EXPECT_TRUE(shares == expected) << to_string(whole) << " in " << std::ssize(cuts) - 1;
  }
}

TEST(QuantizeShard, ShardsHaveTheBitsOfTheWhole) {
  testing::on_each_device([](Stream& s) {
    for (const DType rounded : {DType::f32, DType::bf16})
      for (const Shape& shape : {Shape{3, 5}, Shape{5, 130}, Shape{260, 129}, Shape{3, 130, 141}, Shape{2, 256, 384}})
        expect_the_whole(s, Array::normal(shape, DType::f32, 5), rounded);
  });
}

TEST(QuantizeShard, BlocksOfZerosAndOfNonFiniteValues) {
  const Shape shape{130, 300};
  Values x(shape.numel(), 0.0);
  for (int64_t i = 0; i < 60; ++i) x[i * 300 + 250] = 1e-30 * static_cast<double>(i);  // the third block alone
  x[129 * 300 + 1] = std::nan("");
  x[3 * 300 + 140] = std::numeric_limits<double>::infinity();
  testing::on_each_device([&](Stream& s) { expect_the_whole(s, Array::of(shape, DType::f32, x), DType::f32); });
}

TEST(QuantizeShard, RefusesWhatItCannotQuantise) {
  ThreadPool pool{1};
  Stream s(DeviceKind::cpu, pool);
  Array x = Array::normal({4, 4}, DType::f32, 1);
  const QuantisedArray rows({4, 4}, kElement, ScaleLayout::row_blocks);
  const Operand q = rows.operand();
  std::vector<int32_t> bits(1);
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([&] {
              quantize_shard(s, {.q_n = q.data.view({16}),
                                 .scales = q.scales,
                                 .bits_WB = tensor_of(bits.data(), {1, 1}),
                                 .x_n = x.tensor().view({16}),
                                 .whole = {4, 4}});
            }),
            "quantize_shard: scales must be f32[1, 1]; got f32[4, 1]");
  EXPECT_EQ(message([&] {
              block_magnitudes(
                  s,
                  {.bits_B = tensor_of(bits.data(), {1}), .x_n = x.tensor().view({16}), .whole = {4, 4}, .first = 1});
            }),
            "block_magnitudes: expected elements of weights [4, 4]; got [1, 17)");
}

}  // namespace
}  // namespace moebius
