// Moments in 8-bit blocks (core/block_code.h), and gradients in bf16.
#include <array>

#include "core/block_code.h"
#include "ops/cpu/testing.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/rounding.h"

namespace moebius {
namespace {

using testing::Array;

enum class Master { f32, remainder, param, itself };  // itself: an f32 param that is its own master
struct Case {
  Master master = Master::f32;
  bool adamw = true;
  DType grad = DType::f32;
};
const std::vector<Case> kCases = {{Master::f32},
                                  {Master::remainder},
                                  {Master::param},
                                  {Master::itself},
                                  {Master::param, false},
                                  {Master::param, true, DType::bf16},
                                  {Master::f32, false, DType::bf16}};

class BlockStates : public testing::DeviceTest<Case> {
 protected:
  struct Arrays {
    Array param, master, remainder, m, v, m_scale, v_scale, grad;
  };
  Arrays arrays(int64_t n, const Case& form) {
    Arrays a{.param = Array::normal({n}, form.master == Master::itself ? DType::f32 : DType::bf16, 1),
             .master = Array::normal({n}, DType::f32, 1),
             .remainder = Array({n}, DType::u16),
             .m = Array({n}, DType::u8),
             .v = Array({n}, DType::u8),
             .m_scale = Array({n / kCodeBlock}, DType::f32),
             .v_scale = Array({n / kCodeBlock}, DType::f32),
             .grad = Array::normal({n}, form.grad, 2)};
    if (form.master == Master::remainder)
      split_master(s_,
                   {.weight_n = a.param.tensor(), .remainder_n = a.remainder.tensor(), .master_n = a.master.tensor()});
    return a;
  }
  static UpdatedTensor tensor(Arrays& a, const Case& form, const RoundingDraws& draws = {}) {
    UpdatedTensor t{.param_n = a.param.tensor(),
                    .m_n = a.m.tensor(),
                    .grad_n = a.grad.tensor(),
                    .weight_decay = 0.25f,
                    .draws = draws,
                    .m_scale_b = a.m_scale.tensor()};
    if (form.adamw) t.v_n = a.v.tensor();
    if (form.adamw) t.v_scale_b = a.v_scale.tensor();
    if (form.master == Master::f32) t.master_n = a.master.tensor();
    if (form.master == Master::itself) t.master_n = a.param.tensor();
    if (form.master == Master::remainder) t.remainder_n = a.remainder.tensor();
    return t;
  }
  void update(std::span<const UpdatedTensor> tensors, const Case& form, int64_t step) {
    Array scale = Array::of({1}, DType::f32, {0.5});
    if (form.adamw)
      adamw(s_, {.tensors = tensors, .scale_1 = scale.tensor(), .lr = 0.125f, .beta1 = 0.875f, .step = step});
    else
      sgd(s_, {.tensors = tensors, .scale_1 = scale.tensor(), .lr = 0.125f, .momentum = 0.5f, .step = step});
    scale.values();  // waits
  }
  static std::vector<std::vector<unsigned char>> bytes(const Arrays& a) {
    return {a.param.bytes(), a.master.bytes(),  a.remainder.bytes(), a.m.bytes(),
            a.v.bytes(),     a.m_scale.bytes(), a.v_scale.bytes()};
  }
  // Returns the moments as f32 tensors.
  static Array decoded_of(Array& codes, Array& scales, BlockCode code) {
    const int64_t n = codes.tensor().numel();
    Array x({n}, DType::f32);
    decode_blocks(code, x.tensor().ptr<float>(), codes.tensor().ptr<uint8_t>(), scales.tensor().ptr<float>(), n);
    return x;
  }
};
INSTANTIATE_TEST_SUITE_P(Forms, BlockStates, ::testing::ValuesIn(testing::on_each_device(kCases)));

// Each step begins with f32 moments of the same values. The codes are what those become, rounded
// with the draw of the element, seed and step; weights have the bits of f32 moments.
TEST_P(BlockStates, UpdateAsF32DoesAndThenRound) {
  const int64_t n = 5 * kCodeBlock;
  Arrays got = arrays(n, c());
  const RoundingDraws draws{.seed = 9, .key = 77, .begin = 256, .run = 256, .stride = 1024, .first = 512};
  for (int64_t step = 1; step <= 20; ++step) {
    got.grad = Array::normal({n}, c().grad, 1000 + static_cast<uint64_t>(step));
    Arrays f32 = got;
    Array m = decoded_of(got.m, got.m_scale, BlockCode::with_sign),
          v = decoded_of(got.v, got.v_scale, BlockCode::without_sign);
    UpdatedTensor expected = tensor(f32, c(), draws);
    expected.m_n = m.tensor();
    if (c().adamw) expected.v_n = v.tensor();
    expected.m_scale_b = expected.v_scale_b = {};
    const UpdatedTensor t = tensor(got, c(), draws);
    update({&t, 1}, c(), step);
    update({&expected, 1}, c(), step);
    ASSERT_EQ(got.param.bytes(), f32.param.bytes());
    ASSERT_EQ(got.master.bytes(), f32.master.bytes());
    ASSERT_EQ(got.remainder.bytes(), f32.remainder.bytes());
    const Rng rng(9, RngSite::rounding, static_cast<uint64_t>(step), 77);
    std::vector<uint32_t> of_m(n), of_v(n);
    for (int64_t i = 0; i < n; ++i) {
      const auto bits = rng.bits(static_cast<uint64_t>(512 + (256 + i) / 256 * 1024 + i % 256));
      of_m[i] = bits[0] & 0xffffu;
      of_v[i] = bits[0] >> 16;
    }
    Arrays as_codes = got;
    encode_blocks(BlockCode::with_sign, as_codes.m.tensor().ptr<uint8_t>(), as_codes.m_scale.tensor().ptr<float>(),
                  m.tensor().ptr<float>(), of_m.data(), n);
    ASSERT_EQ(got.m.bytes(), as_codes.m.bytes()) << step;
    ASSERT_EQ(got.m_scale.bytes(), as_codes.m_scale.bytes());
    if (!c().adamw) continue;
    encode_blocks(BlockCode::without_sign, as_codes.v.tensor().ptr<uint8_t>(), as_codes.v_scale.tensor().ptr<float>(),
                  v.tensor().ptr<float>(), of_v.data(), n);
    ASSERT_EQ(got.v.bytes(), as_codes.v.bytes()) << step;
    ASSERT_EQ(got.v_scale.bytes(), as_codes.v_scale.bytes());
  }
}

// A matrix of 30 rows of 512 as a whole, in ranges of blocks, and in halves of its columns.
TEST_P(BlockStates, ShardsHaveTheBitsOfTheWhole) {
  const int64_t rows = 30, columns = 512, n = rows * columns;
  Arrays whole = arrays(n, c()), ranges = whole, shards = whole;
  const RoundingDraws draws{.seed = 1, .key = 2, .run = n, .stride = n};
  for (const int64_t step : {3, 4}) {
    const UpdatedTensor all = tensor(whole, c(), draws);
    update({&all, 1}, c(), step);
    const auto part = [](UpdatedTensor t, int64_t begin, int64_t end) {
      for (Tensor* x : {&t.param_n, &t.master_n, &t.remainder_n, &t.m_n, &t.v_n, &t.grad_n})
        if (!x->empty()) *x = x->rows(begin, end);
      for (Tensor* x : {&t.m_scale_b, &t.v_scale_b})
        if (!x->empty()) *x = x->rows(begin / kCodeBlock, end / kCodeBlock);
      return t;
    };
    std::vector<UpdatedTensor> cut;
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 256}, {256, 7680}, {7680, n}}) {
      cut.push_back(part(tensor(ranges, c(), draws), begin, end));
      cut.back().draws.begin = begin;
    }
    update(cut, c(), step);
    EXPECT_EQ(bytes(ranges), bytes(whole));
    std::vector<UpdatedTensor> by_rows;
    for (const int64_t first : {256, 0}) {
      for (int64_t r = 0; r < rows; ++r) {
        by_rows.push_back(part(tensor(shards, c(), draws), r * columns + first, r * columns + first + 256));
        by_rows.back().draws = {.seed = 1, .key = 2, .begin = r * 256, .run = 256, .stride = columns, .first = first};
      }
    }
    update(by_rows, c(), step);
    EXPECT_EQ(bytes(shards), bytes(whole));
  }
}

TEST_P(BlockStates, AScaleThatIsNaNLeavesAllAsItWas) {
  Arrays got = arrays(512, c());
  const Arrays before = got;
  Array scale = Array::of({1}, DType::f32, {std::numeric_limits<double>::quiet_NaN()});
  const UpdatedTensor t = tensor(got, c());
  if (c().adamw)
    adamw(s_, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 1});
  else
    sgd(s_, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 1, .momentum = 0.5f});
  EXPECT_EQ(bytes(got), bytes(before));
}

// A bf16 gradient is the f32 gradient of the same value.
TEST_P(BlockStates, SquaresOfBf16AreThoseOfTheirValues) {
  const int64_t n = 70001;
  Array half = Array::normal({n}, DType::bf16, 5), wide = Array::of({n}, DType::f32, half.values());
  const auto sum_of = [&](Array& x) {
    Array sum({1}, DType::f64), partial({2}, DType::f64);
    const Tensor t = x.tensor();
    sum_squares(s_, {.sum_1 = sum.tensor(), .partial_P = partial.tensor(), .x = {&t, 1}});
    return sum.bytes();
  };
  EXPECT_EQ(sum_of(half), sum_of(wide));
}

// A sum in bf16 of f32 gradients, of whole vectors and of others.
TEST_P(BlockStates, SumsOfGradientsAreRoundedOnce) {
  for (const int64_t n : {1, 7, 4096, 70000, 70001}) {
    for (const bool on_host : {false, true}) {
      Array sum = Array::normal({n}, DType::bf16, 3), grad = Array::normal({n}, DType::f32, 4),
            stored({n}, DType::bf16);
      const Array before = sum;
      sum_gradient(s_, {.sum_n = sum.tensor(), .grad_n = grad.tensor(), .on_host = on_host});
      sum_gradient(s_, {.sum_n = stored.tensor(), .grad_n = grad.tensor(), .adds = false, .on_host = on_host});
      const testing::Values was = before.values(), x = grad.values(), is = sum.values(), copied = stored.values();
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(is[i], to_f32(to_bf16(static_cast<float>(was[i]) + static_cast<float>(x[i])))) << n << " " << i;
        ASSERT_EQ(copied[i], to_f32(to_bf16(static_cast<float>(x[i])))) << n << " " << i;
      }
    }
  }
}

TEST(BlockStateErrors, AreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array half({256}, DType::bf16), codes({256}, DType::u8), grad({256}, DType::f32), one({1}, DType::f32),
      two({2}, DType::f32), few({100}, DType::u8);
  const auto error = [&](const UpdatedTensor& t) {
    return testing::error_of([&] { adamw(s, {.tensors = {&t, 1}, .scale_1 = one.tensor()}); });
  };
  UpdatedTensor t{.param_n = half.tensor(),
                  .m_n = codes.tensor(),
                  .v_n = codes.tensor(),
                  .grad_n = grad.tensor(),
                  .m_scale_b = one.tensor(),
                  .v_scale_b = two.tensor()};
  EXPECT_EQ(error(t), "adamw: v_scale must be f32[1]; got f32[2]");
  t.v_n = half.tensor();
  EXPECT_EQ(error(t), "adamw: v must be u8[256]; got bf16[256]");
  t = {.param_n = half.tensor().rows(0, 100),
       .m_n = few.tensor(),
       .v_n = few.tensor(),
       .grad_n = grad.tensor().rows(0, 100)};
  EXPECT_EQ(error(t), "adamw: expected a multiple of 256 elements for 8-bit blocks; got 100");
}

}  // namespace
}  // namespace moebius
