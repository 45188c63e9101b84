#include "ops/low_rank/low_rank.h"

#include "ops/cpu/testing.h"
#include "ops/low_rank/low_rank_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  std::vector<int64_t> counts;  // rows of each matrix; one: without offsets
  int64_t wide, rank;
  bool gather = false;
  DType dtype = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : {Case{{0}, 3, 2}, Case{{1}, 1, 1}, Case{{7}, 13, 3}, Case{{67}, 33, 16}, Case{{300}, 530, 8},
                   Case{{5, 0, 9}, 20, 4, true}, Case{{0, 130, 1, 64}, 45, 5, true}, Case{{3, 4}, 17, 2},
                   Case{{1}, 8, 8}, Case{{1500}, 264, 16}, Case{{0, 130, 1, 64, 0, 257}, 520, 8, true},
                   Case{{40, 128, 3}, 136, 40, true}, Case{std::vector<int64_t>(70, 5), 40, 16},
                   // Windows that do not begin at multiples of 16 bytes, or end within them.
                   Case{{300}, 265, 51}, Case{{0, 130, 1, 257}, 523, 7, true}, Case{{40, 128, 3}, 138, 34, true},
                   Case{{1500}, 264, 12}, Case{{129, 5}, 130, 16}}) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

// Tensors of a case: wide [*, wide + 2 spare] with columns to spare on either side, low [*, 2 rank], weights with
// rows to spare above and below, and rows of no expert at the end. Wide matrices of a multiple of 8 columns have 8 to
// spare, so that the kernels that need this take them.
class LowRankTest : public testing::DeviceTest<Case> {
 protected:
  LowRankTest() {
    for (const int64_t count : c_.counts) rows_.offsets.push_back(rows_.offsets.back() + count);
    R_ = rows_.offsets.back() + (E_ > 1 ? 2 : 0);
    if (c_.gather) {
      for (int64_t r = 0; r < R_; ++r) rows_.token.push_back((r * 5 + 2) % source_rows());
    }
    offsets_ = ints(rows_.offsets);
    token_ = ints(rows_.token);
  }
  static Array ints(const std::vector<int64_t>& values) {
    return Array::of({std::ssize(values)}, DType::i32, Values(values.begin(), values.end()));
  }
  int64_t source_rows() const { return c_.gather ? R_ / 2 + 1 : R_; }
  Rows rows(bool with_token) {
    return {.offsets_e1 = E_ > 1 ? offsets_.tensor() : Tensor{}, .token_R = with_token ? token_.tensor() : Tensor{}};
  }
  Shape weights(int64_t rows, int64_t columns) const {
    return E_ > 1 ? Shape{E_, rows, columns} : Shape{rows, columns};
  }
  template <class Op, class Run>
  void run(Op op, Run fn) {
    Array scratch({Op::scratch_bytes(op, s_)}, DType::u8);
    op.scratch = scratch.tensor();
    fn(s_, op);
    s_.device() == DeviceKind::cuda ? scratch.bytes().clear() : void();
  }
  // Sums of n products of normal values, rounded to the dtype once.
  double tolerance(int64_t n) const {
    return testing::epsilon(c_.dtype) + testing::epsilon(DType::f32) * std::sqrt(static_cast<double>(n));
  }

  const Case c_ = c();
  const int64_t spare_ = c_.wide % 8 == 0 ? 8 : 1;
  const int64_t E_ = std::ssize(c_.counts);
  int64_t R_ = 0;
  ref::LowRankRows rows_{.offsets = {0}, .token = {}};
  Array offsets_, token_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, LowRankTest, ::testing::ValuesIn(testing::on_each_device(cases())));

constexpr float kScale = 0.37f;

// u = A x as forward computes it, then y += scale B u into a window of columns, from a window of u.
TEST_P(LowRankTest, ProductsEqualTheReference) {
  const int64_t W = c_.wide, r = c_.rank;
  Array x = Array::normal({source_rows(), W + 2 * spare_}, c_.dtype, 1),
        a = Array::normal(weights(2 * r, W), c_.dtype, 2), low = Array::poisoned({R_, 2 * r}, c_.dtype),
        y = Array::normal({R_, W + 2 * spare_}, c_.dtype, 3),
        b = Array::normal(weights(W + 2 * spare_, r), c_.dtype, 4);
  ref::LowRankMatrix want_low{low.values(), 2 * r}, want_y{y.values(), W + 2 * spare_};
  ref::low_rank_product(want_low, {x.values(), W + 2 * spare_}, {a.values(), W}, rows_,
                        {.y = {0, 2 * r}, .x = {spare_, W}, .w_rows = 2 * r});
  run(LowRankProduct{.y_RM = low.tensor(),
                     .x_TK = x.tensor(),
                     .w_ePQ = a.tensor(),
                     .y = {0, 2 * r},
                     .x = {spare_, W},
                     .rows = rows(c_.gather)},
      low_rank_product);
  const auto owned = [&](const Values& v, int64_t columns) {
    return Values(v.begin(), v.begin() + rows_.offsets.back() * columns);
  };
  testing::expect_close("A x", owned(low.values(), 2 * r), owned(want_low.values, 2 * r), tolerance(W), 1e-6);

  ref::LowRankRows in_place = rows_;
  in_place.token.clear();
  Array half = Array::normal({R_, 2 * r}, c_.dtype, 5);
  ref::low_rank_product(want_y, {half.values(), 2 * r}, {b.values(), r}, in_place,
                        {.y = {spare_, W},
                         .x = {r, r},
                         .w_rows = W + 2 * spare_,
                         .w_first = spare_,
                         .accumulate = true,
                         .scale = double{kScale}});
  run(LowRankProduct{.y_RM = y.tensor(),
                     .x_TK = half.tensor(),
                     .w_ePQ = b.tensor(),
                     .y = {spare_, W},
                     .x = {r, r},
                     .w_first = spare_,
                     .accumulate = true,
                     .scale = kScale,
                     .rows = rows(false)},
      low_rank_product);
  testing::expect_close("y", y.values(), want_y.values, tolerance(r), 1e-6);
}

// v = scale B^T dy from a window, then dx += A^T v.
TEST_P(LowRankTest, TransposedProductsEqualTheReference) {
  const int64_t W = c_.wide, r = c_.rank;
  Array dy = Array::normal({source_rows(), W + 2 * spare_}, c_.dtype, 1),
        b = Array::normal(weights(W + 2 * spare_, r), c_.dtype, 2), dlow = Array::normal({R_, 2 * r}, c_.dtype, 3);
  ref::LowRankMatrix want{dlow.values(), 2 * r};
  ref::low_rank_product(want, {dy.values(), W + 2 * spare_}, {b.values(), r}, rows_,
                        {.y = {r, r},
                         .x = {spare_, W},
                         .w_rows = W + 2 * spare_,
                         .w_first = spare_,
                         .transposed = true,
                         .scale = double{kScale}});
  run(LowRankProduct{.y_RM = dlow.tensor(),
                     .x_TK = dy.tensor(),
                     .w_ePQ = b.tensor(),
                     .y = {r, r},
                     .x = {spare_, W},
                     .w_first = spare_,
                     .transposed = true,
                     .scale = kScale,
                     .rows = rows(c_.gather)},
      low_rank_product);
  testing::expect_close("dlow", dlow.values(), want.values, tolerance(W), 1e-6);
}

TEST_P(LowRankTest, WeightGradientsEqualTheReference) {
  const int64_t W = c_.wide, r = c_.rank;
  Array dy = Array::normal({source_rows(), W + 2 * spare_}, c_.dtype, 1), low = Array::normal({R_, 2 * r}, c_.dtype, 2),
        db = Array::normal(weights(W + 2 * spare_, r), DType::f32, 3),
        da = Array::normal(weights(2 * r, W), DType::f32, 4);
  ref::LowRankMatrix want_b{db.values(), r}, want_a{da.values(), W};
  ref::low_rank_wgrad(want_b, {dy.values(), W + 2 * spare_}, {low.values(), 2 * r}, rows_,
                      {.left = {spare_, W},
                       .right = {r, r},
                       .w_rows = W + 2 * spare_,
                       .w_first = spare_,
                       .scale = double{kScale},
                       .gather_left = c_.gather});
  ref::low_rank_wgrad(want_a, {low.values(), 2 * r}, {dy.values(), W + 2 * spare_}, rows_,
                      {.left = {0, 2 * r}, .right = {spare_, W}, .w_rows = 2 * r, .gather_right = c_.gather});
  run(LowRankWgrad{.dw_ePQ = db.tensor(),
                   .left_RM = dy.tensor(),
                   .right_RN = low.tensor(),
                   .left = {spare_, W},
                   .right = {r, r},
                   .w_first = spare_,
                   .scale = kScale,
                   .gather_left = c_.gather,
                   .rows = rows(c_.gather)},
      low_rank_wgrad);
  run(LowRankWgrad{.dw_ePQ = da.tensor(),
                   .left_RM = low.tensor(),
                   .right_RN = dy.tensor(),
                   .left = {0, 2 * r},
                   .right = {spare_, W},
                   .gather_right = c_.gather,
                   .rows = rows(c_.gather)},
      low_rank_wgrad);
  const double relative = testing::epsilon(DType::f32) * std::sqrt(static_cast<double>(R_ + 1));
  testing::expect_close("dB", db.values(), want_b.values, relative, 1e-6);
  testing::expect_close("dA", da.values(), want_a.values, relative, 1e-6);
}

// The activations of experts: SwiGLU, and that of gpt-oss, whose limits cut some of these values.
const GatedActivation kActivations[] = {{}, {.alpha = 1.702f, .limit = 1.0f, .shift = 1.0f}};

TEST_P(LowRankTest, ActivationsEqualTheReference) {
  const int64_t F = c_.wide;
  for (const GatedActivation& f : kActivations) {
    Array h = Array::normal({R_, 2 * F}, c_.dtype, 1), g = Array::normal({R_, F}, c_.dtype, 2),
          a = Array::poisoned({R_, F}, c_.dtype), dh = Array::normal({R_, 2 * F}, c_.dtype, 3),
          weight = Array::normal({R_}, DType::f32, 4), dweight = Array::normal({R_}, DType::f32, 5);
    Values want_a, got_a, want_dh = dh.values(), want_dweight = dweight.values();
    const Values all_h = h.values(), all_g = g.values(), weights_R = weight.values();
    for (int64_t row = 0; row < rows_.offsets.back(); ++row) {
      const Values h_row(all_h.begin() + row * 2 * F, all_h.begin() + (row + 1) * 2 * F),
          g_row(all_g.begin() + row * F, all_g.begin() + (row + 1) * F);
      const Values a_row = ref::low_rank_activation(h_row, f),
                   add = ref::d_low_rank_activation(h_row, g_row, weights_R[row], f);
      want_a.insert(want_a.end(), a_row.begin(), a_row.end());
      for (int64_t i = 0; i < 2 * F; ++i) want_dh[row * 2 * F + i] += add[i];
      want_dweight[row] += testing::dot(g_row, a_row);
    }
    low_rank_activation(s_,
                        {.a_RF = a.tensor(), .h_R2F = h.tensor(), .offsets_e1 = offsets_.tensor(), .activation = f});
    d_low_rank_activation(s_, {.dh_R2F = dh.tensor(),
                               .dweight_R = dweight.tensor(),
                               .g_RF = g.tensor(),
                               .h_R2F = h.tensor(),
                               .weight_R = weight.tensor(),
                               .offsets_e1 = offsets_.tensor(),
                               .activation = f});
    got_a = a.values();
    got_a.resize(want_a.size());
    // exp_f32 is within 2 ulp, and the rest is a few operations.
    const double relative = 2 * testing::epsilon(c_.dtype) + 16 * testing::epsilon(DType::f32);
    testing::expect_close("a", got_a, want_a, relative, 1e-6);
    testing::expect_close("dh", dh.values(), want_dh, relative, 1e-6);
    testing::expect_close("dweight", dweight.values(), want_dweight, relative, 1e-5);
  }
}

// Two maps of a matrix with rows of others between and after them.
TEST(LowRank, BlocksArePaddedWithZerosToAllRows) {
  constexpr int64_t kExperts = 3, kRows = 9, kFromRows = 5, kRank = 2;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    testing::on_each_device([&](Stream& s) {
      Array from = Array::normal({kExperts, kFromRows, kRank}, dtype, 1);
      Array to = Array::poisoned({kExperts, kRows, 2 * kRank}, dtype);
      const auto block = [&](int64_t column, int64_t first, int64_t count, int64_t row) {
        low_rank_block(s, {.to_eML = to.tensor(),
                           .from_ePQ = from.tensor(),
                           .columns = {column, kRank},
                           .first = first,
                           .count = count,
                           .row = row});
      };
      block(0, 1, 3, 0);
      block(kRank, 6, 2, 3);
      Values want(kExperts * kRows * 2 * kRank);
      const Values all = from.values();
      const auto put = [&](int64_t e, int64_t m, int64_t column, int64_t row) {
        for (int64_t n = 0; n < kRank; ++n)
          want[((e * kRows) + m) * 2 * kRank + column + n] = all[(e * kFromRows + row) * kRank + n];
      };
      for (int64_t e = 0; e < kExperts; ++e) {
        for (int64_t i = 0; i < 3; ++i) put(e, 1 + i, 0, i);
        for (int64_t i = 0; i < 2; ++i) put(e, 6 + i, kRank, 3 + i);
      }
      EXPECT_EQ(to.values(), want);
    });
  }
}

TEST(LowRank, TheReferenceDerivativeEqualsFiniteDifferences) {
  for (const GatedActivation& f : kActivations) {
    const Values h = Array::normal({14}, DType::f32, 1).values(), g = Array::normal({7}, DType::f32, 2).values();
    testing::expect_gradient(
        "dh", [&](const Values& at) { return 0.3 * testing::dot(g, ref::low_rank_activation(at, f)); }, h,
        ref::d_low_rank_activation(h, g, 0.3, f));
  }
}

TEST(LowRank, TheTeamChangesNoBit) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array x = Array::normal({200, 70}, DType::bf16, 1), w = Array::normal({9, 70}, DType::bf16, 2),
          y({200, 9}, DType::bf16), dw({9, 70}, DType::f32);
    LowRankProduct product{.y_RM = y.tensor(), .x_TK = x.tensor(), .w_ePQ = w.tensor(), .y = {0, 9}, .x = {0, 70}};
    Array scratch({LowRankProduct::scratch_bytes(product, s)}, DType::u8);
    product.scratch = scratch.tensor();
    low_rank_product(s, product);
    LowRankWgrad wgrad{
        .dw_ePQ = dw.tensor(), .left_RM = y.tensor(), .right_RN = x.tensor(), .left = {0, 9}, .right = {0, 70}};
    Array more({LowRankWgrad::scratch_bytes(wgrad, s)}, DType::u8);
    wgrad.scratch = more.tensor();
    low_rank_wgrad(s, wgrad);
    return std::vector<Array>{y, dw};
  });
}

TEST(LowRank, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 6}, DType::f32), y({4, 8}, DType::f32), w({8, 6}, DType::f32), ints({4, 6}, DType::i32),
      scratch({1 << 20}, DType::u8);
  const auto product = [&](Array& from, Columns to, int64_t w_first) {
    return testing::error_of([&] {
      low_rank_product(s, {.y_RM = y.tensor(),
                           .x_TK = from.tensor(),
                           .w_ePQ = w.tensor(),
                           .y = to,
                           .x = {0, 6},
                           .w_first = w_first,
                           .scratch = scratch.tensor()});
    });
  };
  EXPECT_EQ(product(ints, {0, 8}, 0), "low_rank_product: x must be an f32 or bf16 matrix; got i32[4, 6]");
  EXPECT_EQ(product(x, {4, 5}, 0), "low_rank_product: y must have the columns [4, 9); got f32[4, 8]");
  EXPECT_EQ(product(x, {0, 8}, 1), "low_rank_product: w must have the rows [1, 9) and 6 columns; got f32[8, 6]");
  EXPECT_EQ(testing::error_of([&] {
              low_rank_wgrad(s, {.dw_ePQ = w.tensor(),
                                 .left_RM = y.tensor(),
                                 .right_RN = x.tensor(),
                                 .left = {0, 8},
                                 .right = {0, 6},
                                 .gather_left = true,
                                 .scratch = scratch.tensor()});
            }),
            "low_rank_wgrad: a side is gathered, so token must be i32[4]; got f32[0]");
  EXPECT_EQ(testing::error_of([&] { low_rank_activation(s, {.a_RF = x.tensor(), .h_R2F = y.tensor()}); }),
            "low_rank_activation: h must be f32[4, 12]; got f32[4, 8]");
}

TEST(LowRank, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    LowRankProduct product{.y_RM = testing::null_tensor({4, 8}),
                           .x_TK = testing::null_tensor({4, 6}),
                           .w_ePQ = testing::null_tensor({8, 6}),
                           .y = {0, 8},
                           .x = {0, 6}};
    product.scratch = testing::null_tensor({1 << 20});
    low_rank_product(s, product);
  });
  EXPECT_EQ(cost.flops, 2 * 4 * 8 * 6);
}

}  // namespace
}  // namespace moebius
