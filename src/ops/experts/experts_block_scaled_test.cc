// The products of experts with operands of blocks of 128, and with one scale for each tensor, on every device:
// against the definitions in double, on the values of the operands.
#include "device/block_limit.h"
#include "ops/experts/experts_quantised_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::ExpertCase;
using testing::ExpertProblem;
using testing::Values;

using testing::QuantisedFormat;
using enum ScaleLayout;

const QuantisedFormat kBlocks{"blocks", DType::f8_e4m3, row_blocks, square_blocks},
    kTensors{"tensors", DType::f8_e4m3, per_tensor, per_tensor, DType::f8_e5m2};

struct Case : ExpertCase {
  Case(const QuantisedFormat& format, const ExpertCase& c) : ExpertCase(c), format(format) {
    name = fmt::format("{}_{}", format.name, c.name);
  }
  QuantisedFormat format;
};

// Widths that every device supports.
std::vector<Case> cases() {
  const DType t = DType::bf16;
  const std::vector<ExpertCase> of_both{
      {"no_rows", 3, 64, 128, {0, 0}, 0, true, t},
      {"few", 3, 16, 128, {2, 0, 6}, 0, true, t},
      {"spare", 70, 272, 128, {0, 5, 130, 0, 17}, 3, true, t},
      {"in_place", 400, 144, 128, {3, 0, 300}, 97, false, t},
      {"tiles", 300, 400, 384, {129, 0, 257, 64, 1}, 5, true, t},
      {"deep", 200, 1040, 128, {150, 40}, 0, true, t},
      {"deep_back", 90, 80, 640, {140, 20}, 0, true, t},
      {"many_steps", 60, 144, 128, {900, 0, 300}, 0, true, t},
      {"many_experts", 60, 48, 128, {1, 0, 2, 9, 0, 0, 128, 3, 3, 4, 127, 0, 5}, 0, true, t},
      {"one_has_all", 90, 64, 128, {0, 0, 700, 0}, 0, true, t},
      // Experts end in every quarter of a block of 128 rows.
      {"ends", 60, 80, 128, {31, 32, 33, 64, 65, 95, 97, 160, 161, 225}, 0, true, t}};
  // Gate and up have no blocks of their own.
  const std::vector<ExpertCase> of_tensors{{"narrow", 70, 48, 16, {3, 0, 140}, 2, true, t},
                                           {"odd", 130, 272, 208, {65, 300, 0, 31}, 1, true, t},
                                           {"odd_in_place", 130, 96, 144, {65, 200}, 1, false, t}};
  std::vector<Case> all;
  for (const ExpertCase& c : of_both) {
    all.push_back({kBlocks, c});
    all.push_back({kTensors, c});
  }
  for (const ExpertCase& c : of_tensors) all.push_back({kTensors, c});
  return all;
}

struct Outputs {
  Array h, a, y, dh, sa, dweight, dx, dw1, dw2, dw1_added, dw2_added;
  std::vector<Array> all() const { return {h, a, y, dh, sa, dweight, dx, dw1, dw2, dw1_added, dw2_added}; }
};

class BlockScaledExpertsTest : public testing::DeviceTest<Case> {
 protected:
  using Both = testing::QuantisedWithValues;

  Outputs run() {
    const int64_t D = c().D, F = c().F, R = p_.R;
    const DType t = c().dtype;
    Outputs o{.h = Array::poisoned({R, 2 * F}, t),
              .a = Array::poisoned({R, F}, t),
              .y = Array::poisoned({R, D}, t),
              .dh = Array::poisoned({R, 2 * F}, t),
              .sa = Array::poisoned({R, F}, t),
              .dweight = Array::poisoned({R}, DType::f32),
              .dx = Array::poisoned({R, D}, t),
              .dw1 = Array::poisoned({p_.E(), 2 * F, D}, DType::f32),
              .dw2 = Array::poisoned({p_.E(), D, F}, DType::f32),
              .dw1_added = Array::normal({p_.E(), 2 * F, D}, DType::f32, 8),
              .dw2_added = Array::normal({p_.E(), D, F}, DType::f32, 9)};
    const Rows own{p_.offsets.tensor(), {}};
    testing::run_expert_op<ExpertUp>(s_, expert_up,
                                     {.h_R2F = o.h.tensor(),
                                      .a_RF = o.a.tensor(),
                                      .x_TD = x_.q.operand(),
                                      .w1_e2FD = w1_.q.operand(),
                                      .rows = p_.rows()});
    testing::run_expert_op<ExpertDown>(
        s_, expert_down, {.y_RD = o.y.tensor(), .a_RF = a_.q.operand(), .w2_eDF = w2_.q.operand(), .rows = own});
    testing::run_expert_op<DExpertDown>(s_, d_expert_down,
                                        {.dh_R2F = o.dh.tensor(),
                                         .sa_RF = o.sa.tensor(),
                                         .dweight_R = o.dweight.tensor(),
                                         .dout_TD = dout_.q.operand(),
                                         .w2_eDF = w2_back_.q.operand(),
                                         .h_R2F = p_.h.tensor(),
                                         .weight_R = p_.weight.tensor(),
                                         .rows = p_.rows()});
    testing::run_expert_op<DExpertUp>(
        s_, d_expert_up,
        {.dx_RD = o.dx.tensor(), .dh_R2F = dh_.q.operand(), .w1_e2FD = w1_back_.q.operand(), .rows = own});
    const auto run_wgrads = [&](Tensor dw1, Tensor dw2, bool accumulate) {
      for (const ExpertWgrad& wgrad :
           {ExpertWgrad{.dw_eMN = dw1, .left_RM = dh_cols_.q.operand(), .right_RN = x_cols_.q.operand()},
            ExpertWgrad{.dw_eMN = dw2, .left_RM = dout_cols_.q.operand(), .right_RN = a_cols_.q.operand()}}) {
        ExpertWgrad call = wgrad;
        call.accumulate = accumulate;
        call.rows = own;
        testing::run_expert_op<ExpertWgrad>(s_, expert_wgrad, call);
      }
    };
    run_wgrads(o.dw1.tensor(), o.dw2.tensor(), false);
    run_wgrads(o.dw1_added.tensor(), o.dw2_added.tensor(), true);
    return o;
  }

  // The rows that exist are close to the reference; the others were not written.
  void expect_rows(const char* what, const Array& got, Values want, double relative) {
    Values values = got.values();
    const int64_t rows = p_.R - c().spare;
    const auto written = static_cast<size_t>(
        rows == 0 ? 0 : rows * static_cast<int64_t>(values.size()) / static_cast<int64_t>(rows + c().spare));
    for (size_t i = written; i < values.size(); ++i) ASSERT_TRUE(std::isnan(values[i])) << what << " at " << i;
    values.resize(written);
    want.resize(written);
    testing::expect_close(what, values, want, relative, 1e-6);
  }

  void expect_reference(const Outputs& o) {
    // The tensor cores align 32 products to the largest of them and keep 13 bits below it (DeepSeek-V3,
    // arXiv 2412.19437, section 3.5.2). That cuts each by up to 2^-13 of the largest, about 3 standard
    // deviations of a product: 3 * 2^-13 of the sum, which is sqrt(32) deviations, for sqrt(33) cuts.
    const double sum = s_.device() == DeviceKind::cuda ? 0x1p-11 : 0x1p-18;
    const double rounded = 2 * testing::epsilon(c().dtype) + sum;
    expect_rows("h", o.h, ref::expert_h(p_.shape, x_.plain.values(), w1_.plain.values(), p_.R), rounded);
    expect_rows("a", o.a, ref::gated_rows(o.h.values(), p_.R, c().F), rounded);  // of h as rounded
    expect_rows("y", o.y, ref::expert_y(p_.shape, a_.plain.values(), w2_.plain.values(), p_.R), rounded);
    const ref::ExpertBackward b = ref::d_expert_down(p_.shape, dout_.plain.values(), w2_back_.plain.values(),
                                                     p_.h.values(), p_.weight.values(), p_.R);
    expect_rows("dh", o.dh, b.dh, rounded);
    expect_rows("sa", o.sa, b.sa, rounded);
    expect_rows("dweight", o.dweight, b.dweight, rounded);
    expect_rows("dx", o.dx, ref::d_expert_up(p_.shape, dh_.plain.values(), w1_back_.plain.values(), p_.R), rounded);
    // Gradients are stored and added, for experts without rows too.
    for (const bool accumulate : {false, true}) {
      const Shape of_dw1{p_.E(), 2 * c().F, c().D}, of_dw2{p_.E(), c().D, c().F};
      Values dw1(static_cast<size_t>(of_dw1.numel()), 0.0), dw2(static_cast<size_t>(of_dw2.numel()), 0.0);
      if (accumulate) {
        dw1 = Array::normal(of_dw1, DType::f32, 8).values();
        dw2 = Array::normal(of_dw2, DType::f32, 9).values();
      }
      ref::expert_wgrad(p_.shape, dw1, dh_cols_.plain.values(), x_cols_.plain.values(), 2 * c().F, c().D, false, false);
      ref::expert_wgrad(p_.shape, dw2, dout_cols_.plain.values(), a_cols_.plain.values(), c().D, c().F, false, false);
      testing::expect_close("dw1", (accumulate ? o.dw1_added : o.dw1).values(), dw1, sum, 1e-6);
      testing::expect_close("dw2", (accumulate ? o.dw2_added : o.dw2).values(), dw2, sum, 1e-6);
    }
  }

  ExpertProblem p_{c()};
  testing::QuantisedOperands q_{s_, p_, c().format};
  Both x_ = q_.rows_of(p_.x), w1_ = q_.weights_of(p_.w1), a_ = q_.rows_of(p_.a), w2_ = q_.weights_of(p_.w2),
       dout_ = q_.gradients_of(p_.dout), w2_back_ = q_.transposed_weights_of(p_.w2), dh_ = q_.gradients_of(p_.h),
       w1_back_ = q_.transposed_weights_of(p_.w1), dh_cols_ = q_.left_of(p_.h, false),
       x_cols_ = q_.right_of(p_.x, c().gather), dout_cols_ = q_.left_of(p_.dout, c().gather),
       a_cols_ = q_.right_of(p_.a, false);
};
INSTANTIATE_TEST_SUITE_P(Shapes, BlockScaledExpertsTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });

TEST_P(BlockScaledExpertsTest, EqualsTheReference) { expect_reference(run()); }

// Each block of a GPU walks over many tiles, or over few; the bits are the same.
TEST_P(BlockScaledExpertsTest, AnyNumberOfBlocksHasTheSameBits) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "blocks are a GPU's";
  const std::vector<Array> first = run().all(), again = run().all();
  for (const int blocks : {2, 7}) {
    const BlockLimitScope few(s_, blocks);
    const std::vector<Array> by_few = run().all();
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(again[i].bytes(), first[i].bytes()) << "output " << i;
      EXPECT_EQ(by_few[i].bytes(), first[i].bytes()) << "output " << i << " by " << blocks << " blocks";
    }
  }
}

// Rows, values and weights of an expert_down() with one scale for each tensor.
struct DownProblem {
  DownProblem(Stream& s, Array a, Array w2)
      : y(Array::poisoned({R, D}, DType::bf16)),
        a_q({R, F}, DType::f8_e4m3, per_tensor),
        w2_q({3, D, F}, DType::f8_e4m3, per_tensor) {
    quantize(s, {.q = a_q.operand(), .x_RC = a.tensor()});
    quantize(s, {.q = w2_q.operand(), .x_RC = w2.tensor()});
    Array offsets = Array::of_ints({4}, {0, 130, 130, R});
    testing::run_expert_op<ExpertDown>(
        s, expert_down,
        {.y_RD = y.tensor(), .a_RF = a_q.operand(), .w2_eDF = w2_q.operand(), .rows = {offsets.tensor(), {}}});
  }
  static Array numbers(Shape shape, uint64_t key) { return Array::normal(shape, DType::bf16, key); }

  static constexpr int64_t R = 200, D = 48, F = 64;
  Array y;
  testing::QuantisedArray a_q, w2_q;
};

// Each expert's weights have a scale of their own, and all rows share one.
TEST(TensorScaledExperts, NonFiniteValuesAffectAllThatShareTheirScale) {
  testing::on_each_device([](Stream& s) {
    using P = DownProblem;
    const Array a = P::numbers({P::R, P::F}, 1), w2 = P::numbers({3, P::D, P::F}, 2);
    const Values finite = P(s, a, w2).y.values();
    for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      Values of_w2 = w2.values(), of_a = a.values();
      of_w2[2 * P::D * P::F + 5] = bad;  // of the last expert
      of_a[7] = bad;
      const Values got = P(s, a, Array::of({3, P::D, P::F}, DType::bf16, of_w2)).y.values();
      for (size_t i = 0; i < got.size(); ++i) {
        if (i < static_cast<size_t>(130 * P::D))
          ASSERT_EQ(got[i], finite[i]) << i;
        else
          ASSERT_TRUE(std::isnan(got[i])) << i;
      }
      for (const double y : P(s, Array::of({P::R, P::F}, DType::bf16, of_a), w2).y.values()) ASSERT_TRUE(std::isnan(y));
    }
  });
}

TEST(TensorScaledExperts, ZerosGiveZeros) {
  testing::on_each_device([](Stream& s) {
    using P = DownProblem;
    const auto zeros = [](Shape shape) { return Array::of(shape, DType::bf16, Values(shape.numel(), 0.0)); };
    for (const double y : P(s, zeros({P::R, P::F}), P::numbers({3, P::D, P::F}, 2)).y.values()) ASSERT_EQ(y, 0);
    for (const double y : P(s, P::numbers({P::R, P::F}, 1), zeros({3, P::D, P::F})).y.values()) ASSERT_EQ(y, 0);
  });
}

// A gradient that is not finite reaches the weights of all experts that have rows.
TEST(TensorScaledExperts, ExpertsWithoutRowsHaveFiniteGradients) {
  testing::on_each_device([](Stream& s) {
    constexpr int64_t kR = 150, kM = 32, kN = 48;
    Values of_left = Array::normal({kR, kM}, DType::bf16, 1).values();
    of_left[3] = std::nan("");
    Array left = Array::of({kR, kM}, DType::bf16, of_left), right = Array::normal({kR, kN}, DType::bf16, 2);
    Array offsets = Array::of_ints({4}, {0, 40, 40, kR});
    const int64_t padded = padded_rows(kR, 3);
    testing::QuantisedArray left_q({kM, padded}, DType::f8_e5m2, per_tensor, true),
        right_q({kN, padded}, DType::f8_e4m3, per_tensor, true);
    quantize(s, {.q = left_q.operand(), .x_RC = left.tensor(), .offsets_e1 = offsets.tensor()});
    quantize(s, {.q = right_q.operand(), .x_RC = right.tensor(), .offsets_e1 = offsets.tensor()});
    for (const bool accumulate : {false, true}) {
      Array dw = Array::normal({3, kM, kN}, DType::f32, 3);
      const Values before = dw.values();
      testing::run_expert_op<ExpertWgrad>(s, expert_wgrad,
                                          {.dw_eMN = dw.tensor(),
                                           .left_RM = left_q.operand(),
                                           .right_RN = right_q.operand(),
                                           .accumulate = accumulate,
                                           .rows = {offsets.tensor(), {}}});
      const Values got = dw.values();
      for (int64_t i = 0; i < 3 * kM * kN; ++i) {
        if (i / (kM * kN) == 1)
          ASSERT_EQ(got[i], accumulate ? before[i] : 0) << i;
        else
          ASSERT_TRUE(std::isnan(got[i])) << i;
      }
    }
  });
}

// Operands that a GPU has no kernel for are refused where a step is counted for one, before it runs.
TEST(BlockScaledExperts, UnsupportedProductsOfAGpuAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  const auto null = [](Shape shape, DType dtype) { return testing::null_tensor(shape, dtype); };
  const auto rows = [&](Shape shape, ScaleLayout layout) {
    return Operand(null(shape, DType::f8_e4m3), null(scale_shape(layout, shape), scale_dtype(layout)), layout);
  };
  constexpr const char* kWay =
      "set precision.recipe to \"fp8_tensor\", which emulates products that no kernel takes, or to \"none\", add the "
      "parameter's name to precision.keep, or choose run.device = \"cpu\"";
  ExpertDown a{.y_RD = null({8, 32}, DType::bf16),
               .a_RF = rows({8, 24}, row_blocks),
               .w2_eDF = rows({2, 32, 24}, square_blocks),
               .rows = {.offsets_e1 = null({3}, DType::i32)}};
  EXPECT_EQ(testing::error_of([&] { expert_down(s, a); }),
            std::string("expert_down on a GPU: a must be f8_e4m3 with row_blocks scales and rows of a multiple of 16 "
                        "elements; got f8_e4m3[8, 24] with row_blocks scales f32[8, 1]; ") +
                kWay);
  a.a_RF = rows({8, 32}, row_blocks);
  a.w2_eDF = rows({2, 32, 32}, per_tensor);
  EXPECT_EQ(testing::error_of([&] { expert_down(s, a); }),
            std::string("expert_down on a GPU: w2 must be f8_e4m3 with square_blocks scales and rows of a multiple of "
                        "16 elements; got f8_e4m3[2, 32, 32] with per_tensor scales f32[2]; ") +
                kWay);
  a.a_RF = rows({8, 32}, per_tensor);
  a.w2_eDF = rows({2, 32, 32}, square_blocks);
  EXPECT_EQ(testing::error_of([&] { expert_down(s, a); }),
            std::string("expert_down on a GPU: w2 must be f8_e4m3 with per_tensor scales and rows of a multiple of 16 "
                        "elements; got f8_e4m3[2, 32, 32] with square_blocks scales f32[2, 1, 1]; ") +
                kWay);
  a.a_RF = rows({8, 32}, row_blocks);
  a.y_RD = null({8, 32}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { expert_down(s, a); }),
            std::string("expert_down on a GPU: y of a quantised product must be bf16 with a multiple of 8 columns; got "
                        "f32[8, 32]; ") +
                kWay + ", or precision.compute = \"bf16\"");
}

}  // namespace
}  // namespace moebius
