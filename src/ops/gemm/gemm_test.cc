#include "ops/gemm/gemm.h"

#include <gmock/gmock.h>

#include "device/accelerator.h"
#include "io/testing.h"
#include "ops/cpu/testing.h"
#include "ops/gemm/cpu/tile_gemm.h"
#include "ops/gemm/cublas_lt.h"
#include "ops/gemm/gemm_desc.h"
#include "ops/gemm/gemm_ref.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t m, n, k;
  DType dtype = DType::f32, c_dtype = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [dtype, c_dtype] :
       {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{0, 3, 5},
                                                                     {3, 0, 5},
                                                                     {3, 4, 0},
                                                                     {1, 1, 1},
                                                                     {1, 7, 33},
                                                                     {5, 3, 2},
                                                                     {17, 31, 65},
                                                                     {64, 16, 32},
                                                                     {33, 130, 257},
                                                                     {521, 5, 9},
                                                                     {3, 1031, 7},
                                                                     {72, 264, 520},
                                                                     {40, 136, 2100}}) {
      all.push_back({m, n, k, dtype, c_dtype});
    }
  }
  return all;
}

class GemmTest : public testing::DeviceTest<Case> {};

TEST_P(GemmTest, AddsTheBiasToEachRow) {
  const auto [m, n, k, dtype, c_dtype] = c();
  for (const bool few_rows : {false, true}) {
    Array a = Array::normal({m, k}, dtype, 1), b = Array::normal({n, k}, dtype, 2),
          bias = Array::normal({n}, c_dtype, 3);
    Array plain = Array::poisoned({m, n}, DType::f32), got = Array::poisoned({m, n}, c_dtype);
    const Gemm product{.c_MN = plain.tensor(), .a = a.tensor(), .b = b.tensor(), .trans_b = true, .few_rows = few_rows};
    gemm(s_, product);
    Gemm with_bias = product;
    with_bias.c_MN = got.tensor();
    with_bias.bias_N = bias.tensor();
    gemm(s_, with_bias);
    synchronize(s_);
    const Values sum = plain.values(), row = bias.values(), values = got.values();
    // The product and its sum with the bias are rounded to the dtype of c, and f32 sums may have another order.
    const double eps = c_dtype == DType::bf16 ? 0x1p-8 : 0x1p-23 * std::sqrt(static_cast<double>(k) + 1);
    for (int64_t i = 0; i < m * n; ++i) {
      const double size = std::abs(sum[i]) + std::abs(row[i % n]) + std::sqrt(static_cast<double>(k));
      ASSERT_NEAR(values[i], sum[i] + row[i % n], 2 * eps * size) << i;
    }
  }
}

TEST(Gemm, ABiasExcludesAccumulate) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array a = Array::normal({2, 3}, DType::f32, 1), b = Array::normal({3, 4}, DType::f32, 2),
        c = Array::normal({2, 4}, DType::f32, 3), bias = Array::normal({4}, DType::f32, 4);
  expect_error(ErrorKind::usage, "gemm: a bias excludes accumulate; add the bias in the call that sets c", [&] {
    gemm(s, {.c_MN = c.tensor(), .a = a.tensor(), .b = b.tensor(), .bias_N = bias.tensor(), .accumulate = true});
  });
}

TEST_P(GemmTest, EqualsTheReference) {
  const auto [m, n, k, dtype, c_dtype] = c();
  for (int mode = 0; mode < 8; ++mode) {
    const bool trans_a = mode & 1, trans_b = mode & 2, accumulate = mode & 4;
    Array a = Array::normal(trans_a ? Shape{k, m} : Shape{m, k}, dtype, 1),
          b = Array::normal(trans_b ? Shape{n, k} : Shape{k, n}, dtype, 2);
    Array c = accumulate ? Array::normal({m, n}, c_dtype, 3) : Array::poisoned({m, n}, c_dtype);
    Values want = c.values();
    ref::gemm({.c = want,
               .a = a.values(),
               .b = b.values(),
               .m = m,
               .n = n,
               .k = k,
               .trans_a = trans_a,
               .trans_b = trans_b,
               .accumulate = accumulate});
    gemm(s_, {.c_MN = c.tensor(),
              .a = a.tensor(),
              .b = b.tensor(),
              .trans_a = trans_a,
              .trans_b = trans_b,
              .accumulate = accumulate});
    // Products of unit normals: a sum of k has magnitude sqrt(k), each addition errs by eps32 of
    // it; then one rounding to c's dtype.
    const double sum_error = testing::epsilon(DType::f32) * std::sqrt(k + 1.0);
    testing::expect_close("mode " + std::to_string(mode), c.values(), want, testing::epsilon(c_dtype),
                          sum_error * std::sqrt(k + 1.0));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// Twice: the first call on a GPU times algorithms, and must not change c; the second runs the
// one it chose.
TEST(Gemm, SameBitsEachTime) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Array a = Array::normal({512, 264}, dtype, 1), b = Array::normal({512, 136}, dtype, 2),
            first = Array::normal({264, 136}, DType::f32, 3), second = first;
      for (Array* c : {&first, &second}) {
        gemm(s, {.c_MN = c->tensor(), .a = a.tensor(), .b = b.tensor(), .trans_a = true, .accumulate = true});
      }
      EXPECT_EQ(first.bytes(), second.bytes());
    }
  });
}

// Each GPU object chooses algorithms again, by its own timings: whichever is chosen, the bits
// are the same.
TEST(Gemm, AnyChoiceOfAGpuGivesTheSameBits) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  const auto product = [](Shape sizes, DType dtype, DType c_dtype, bool accumulate) {
    Accelerator gpu;
    ThreadPool pool(1);
    Stream s(gpu, pool);
    Array a = Array::normal({4096, sizes[0]}, dtype, 1), b = Array::normal({4096, sizes[1]}, dtype, 2),
          c = Array::normal(sizes, c_dtype, 3);
    gemm(s, {.c_MN = c.tensor(), .a = a.tensor(), .b = b.tensor(), .trans_a = true, .accumulate = accumulate});
    synchronize(s);
    return c.bytes();
  };
  for (const auto& [dtype, c_dtype] :
       {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
    for (const bool accumulate : {false, true}) {
      for (const Shape& sizes :
           {Shape{1032, 1160}, Shape{1032, 768}, Shape{257, 128}}) {  // k may be split in all but the first
        const auto first = product(sizes, dtype, c_dtype, accumulate);
        for (int i = 0; i < 3; ++i)
          EXPECT_EQ(product(sizes, dtype, c_dtype, accumulate), first) << to_string(sizes) << name_of(c_dtype);
      }
    }
  }
}

TEST(Gemm, SameBitsForAnyTeam) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    testing::expect_same_bits_for_any_team([&](Stream& s) {
      Array a = Array::normal({64, 1100}, dtype, 1), b = Array::normal({64, 520}, dtype, 2),
            c = Array::normal({1100, 520}, DType::f32, 3);
      gemm(s, {.c_MN = c.tensor(), .a = a.tensor(), .b = b.tensor(), .trans_a = true, .accumulate = true});
      return std::vector<Array>{c};
    });
  }
}

// Every number of few rows, with columns and a depth that fill no step of a kernel.
TEST(Gemm, OfFewRowsEqualsTheReferenceRowByRow) {
  testing::on_each_device([](Stream& s) {
    for (const auto& [n, k] : std::vector<std::array<int64_t, 2>>{
             {8, 8}, {40, 264}, {264, 2056}, {24, 4360}, {51, 130}, {34, 4099}, {1, 1}}) {
      for (const auto& [dtype, c_dtype] : std::vector<std::array<DType, 2>>{
               {DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
        Array x = Array::normal({kFewRows, k}, dtype, 1), w = Array::normal({n, k}, dtype, 2);
        Values want;
        ref::gemm({.c = want, .a = x.values(), .b = w.values(), .m = kFewRows, .n = n, .k = k, .trans_b = true});
        std::vector<unsigned char> of_one;  // rows that were computed alone
        for (int64_t m = 1; m <= kFewRows; ++m) {
          Array c = Array::poisoned({m, n}, c_dtype), alone = Array::poisoned({1, n}, c_dtype);
          const auto product = [&](Array& to, int64_t first, int64_t rows) {
            gemm(s, {.c_MN = to.tensor(),
                     .a = x.tensor().rows(first, first + rows),
                     .b = w.tensor(),
                     .trans_b = true,
                     .few_rows = true});
          };
          product(c, 0, m);
          product(alone, m - 1, 1);
          const Values rows(want.begin(), want.begin() + m * n);
          // A sum of k unit products has magnitude sqrt(k), and each addition errs by eps of it.
          testing::expect_close(fmt::format("{} rows", m), c.values(), rows, testing::epsilon(c_dtype),
                                testing::epsilon(DType::f32) * (k + 1.0));
          const std::vector<unsigned char> row = alone.bytes();
          of_one.insert(of_one.end(), row.begin(), row.end());
          const bool reads_once = s.device() == DeviceKind::cpu || dtype == DType::bf16;
          EXPECT_TRUE(!reads_once || c.bytes() == of_one) << m << " rows";
        }
      }
    }
  });
}

TEST(Gemm, RowsDoNotDependOnOtherRows) {
  if (!cpu::runs_widened()) GTEST_SKIP() << "oneDNN multiplies on this CPU, and chooses its instructions by the rows";
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Array a = Array::normal({67, 129}, dtype, 1), b = Array::normal({50, 129}, dtype, 2), all({67, 50}, DType::f32),
          few({5, 50}, DType::f32);
    gemm(s, {.c_MN = all.tensor(), .a = a.tensor(), .b = b.tensor(), .trans_b = true});
    gemm(s, {.c_MN = few.tensor(), .a = a.tensor().rows(30, 35), .b = b.tensor(), .trans_b = true});
    EXPECT_EQ(std::memcmp(few.tensor().data, all.tensor().rows(30, 35).data, few.bytes().size()), 0);
  }
}

TEST(Gemm, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array a({4, 3}, DType::f32), b({5, 2}, DType::f32), c({4, 2}, DType::f32), i({4, 3}, DType::i32);
  EXPECT_EQ(testing::error_of([&] { gemm(s, {.c_MN = c.tensor(), .a = a.tensor(), .b = b.tensor()}); }),
            "gemm: b must be f32[3, 2]; got f32[5, 2]");
  EXPECT_EQ(testing::error_of([&] { gemm(s, {.c_MN = c.tensor(), .a = i.tensor(), .b = b.tensor()}); }),
            "gemm: a must be f32 or bf16; got i32[4, 3]");
  EXPECT_EQ(testing::error_of([&] { gemm(s, {.c_MN = c.tensor(), .a = a.tensor().view({12}), .b = b.tensor()}); }),
            "gemm: a and b must be matrices; got f32[12] and f32[5, 2]");
  Array b3({3, 2}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { gemm(s, {.c_MN = a.tensor(), .a = a.tensor(), .b = b3.tensor()}); }),
            "gemm: c must be f32[4, 2]; got f32[4, 3]");
}

TEST(GemmDesc, PrintsTheProduct) {
  Array a({7, 5}, DType::bf16), b({7, 3}, DType::bf16), c({5, 3}, DType::f32);
  const Gemm product{.c_MN = c.tensor(), .a = a.tensor(), .b = b.tensor(), .trans_a = true, .accumulate = true};
  GemmDesc desc = describe(product);
  desc.align_a = 16, desc.align_b = 2, desc.align_c = 4;
  EXPECT_EQ(to_string(desc), "5 x 3 x 7, bf16 to f32, A transposed, accumulate, aligned to 16, 2 and 4");
}

TEST(GemmDesc, DistinguishesProducts) {
  alignas(16) static float memory[64];
  const auto at = [](int64_t first) { return tensor_of(memory + first, {2, 2}); };
  const auto desc = [&](int64_t first, bool transposed) {
    return describe({.c_MN = at(16), .a = at(first), .b = at(8), .trans_b = transposed});
  };
  EXPECT_EQ(desc(0, false).align_a, 16);
  EXPECT_EQ(desc(1, false).align_a, 4);
  EXPECT_EQ(desc(2, false).align_a, 8);
  EXPECT_EQ(desc(4, false), desc(0, false));
  EXPECT_EQ(GemmDescHash{}(desc(4, false)), GemmDescHash{}(desc(0, false)));
  for (const GemmDesc& other : {desc(1, false), desc(0, true)}) {
    EXPECT_FALSE(other == desc(0, false));
    EXPECT_NE(GemmDescHash{}(other), GemmDescHash{}(desc(0, false)));
  }
}

TEST(Gemm, OneQuantisedOperandIsRefused) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({2, 2}, DType::f32), scale({1}, DType::f32);
  const Operand plain = x.tensor(), scaled(x.tensor(), scale.tensor(), ScaleLayout::per_tensor);
  for (const bool a_is_scaled : {true, false}) {
    const Gemm product{.c_MN = x.tensor(), .a = a_is_scaled ? scaled : plain, .b = a_is_scaled ? plain : scaled};
    const char *one = "f32[2, 2] with per_tensor scales f32[1]", *other = "f32[2, 2]";
    EXPECT_EQ(testing::error_of([&] { gemm(s, product); }),
              fmt::format("gemm: a and b must both be quantised, or both plain; got {} and {}",
                          a_is_scaled ? one : other, a_is_scaled ? other : one));
    EXPECT_EQ(
        testing::error_of([&] { gemm_by_onednn(s, product); }),
        fmt::format("gemm_by_onednn: {} has no quantised form yet; expected an f32 or bf16 tensor without scales, "
                    "got {}",
                    a_is_scaled ? "a" : "b", one));
  }
}

struct QuantisedCase {
  int64_t m, n, k;
  DType element;
  ScaleLayout a, b;
};

class QuantisedGemmTest : public ::testing::TestWithParam<QuantisedCase> {};

// y = x W^T, dx = dy W and dW += dy^T x multiply the values of their operands.
TEST_P(QuantisedGemmTest, EqualsTheReference) {
  const auto& [m, n, k, element, a_layout, b_layout] = GetParam();
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  for (int mode = 0; mode < 8; ++mode) {
    const bool trans_a = mode & 1, trans_b = mode & 2, accumulate = mode & 4;
    const DType c_dtype = mode % 3 == 0 ? DType::bf16 : DType::f32;
    Array x = Array::normal({m, k}, DType::f32, 1), y = Array::normal({n, k}, DType::bf16, 2),
          c = Array::normal({m, n}, c_dtype, 3);
    testing::QuantisedArray a({m, k}, element, a_layout, trans_a), b({n, k}, element, b_layout, !trans_b);
    for (const auto& [q, values] : {std::pair{&a, &x}, std::pair{&b, &y}}) {
      Operand as_it_is = q->operand();
      as_it_is.transposed = false;
      quantize(s, {.q = as_it_is, .x_RC = values->tensor()});
    }
    Values want = c.values();
    ref::gemm({.c = want,
               .a = a.values(s),
               .b = b.values(s),
               .m = m,
               .n = n,
               .k = k,
               .trans_b = true,
               .accumulate = accumulate});
    gemm(s, {.c_MN = c.tensor(),
             .a = a.operand(),
             .b = b.operand(),
             .trans_a = trans_a,
             .trans_b = trans_b,
             .accumulate = accumulate});
    // Sums of k products in f32, then one rounding.
    const double sum = testing::epsilon(DType::f32) * std::sqrt(static_cast<double>(k));
    testing::expect_close(fmt::format("mode {}", mode), c.values(), want, testing::epsilon(c_dtype) + sum, 1e-6);
  }
}

std::vector<QuantisedCase> quantised_cases() {
  using enum ScaleLayout;
  std::vector<QuantisedCase> all;
  for (const auto& [m, n, k] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 2}, {5, 3, 130}, {130, 70, 260}, {3, 530, 700}}) {
    all.push_back({m, n, k, DType::f8_e4m3, row_blocks, square_blocks});
    all.push_back({m, n, k, DType::f8_e4m3, row_blocks, row_blocks});
    all.push_back({m, n, k, DType::f8_e5m2, per_tensor, per_tensor});
    all.push_back({m, n, k, DType::f8_e4m3, mx_blocks, mx_blocks});
    all.push_back({m, n, k, DType::f4_e2m1, nv_blocks, nv_blocks});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Formats, QuantisedGemmTest, ::testing::ValuesIn(quantised_cases()));

// Operands in widths that every device supports: y = x W^T, dx += dy W, dW += dy^T x.
struct ProductFormat {
  ScaleLayout rows, weights;
  DType of_x, of_dy;
};

void expect_products_of_reference(const ProductFormat& format) {
  testing::on_each_device([&](Stream& s) {
    // A GPU cuts products to 13 bits below the largest of 32: 3 standard deviations, 2^-13 each.
    const double sum = s.device() == DeviceKind::cuda ? 0x1p-11 : 0x1p-18;
    for (const auto& [T, n, k] : std::vector<std::array<int64_t, 3>>{{1, 16, 16}, {130, 272, 400}, {300, 144, 1040}}) {
      Array x = Array::normal({T, k}, DType::bf16, 1), w = Array::normal({n, k}, DType::bf16, 2);
      testing::QuantisedArray x_q({T, k}, format.of_x, format.rows), w_q({n, k}, DType::f8_e4m3, format.weights);
      quantize(s, {.q = x_q.operand(), .x_RC = x.tensor()});
      quantize(s, {.q = w_q.operand(), .x_RC = w.tensor()});
      for (const bool accumulate : {false, true}) {
        Array y = Array::normal({T, n}, DType::bf16, 3);
        Values want = y.values();
        ref::gemm({.c = want,
                   .a = x_q.values(s),
                   .b = w_q.values(s),
                   .m = T,
                   .n = n,
                   .k = k,
                   .trans_b = true,
                   .accumulate = accumulate});
        gemm(s,
             {.c_MN = y.tensor(), .a = x_q.operand(), .b = w_q.operand(), .trans_b = true, .accumulate = accumulate});
        testing::expect_close("y", y.values(), want, testing::epsilon(DType::bf16) + sum, 1e-6);
      }
      // The weight gradient sums over T tokens, padded.
      const int64_t padded = padded_rows(T);
      Array dy = Array::normal({T, n}, DType::bf16, 4), dw = Array::normal({n, k}, DType::f32, 5);
      testing::QuantisedArray dy_q({n, padded}, format.of_dy, format.rows, true),
          xt_q({k, padded}, DType::f8_e4m3, format.weights, true);
      quantize(s, {.q = dy_q.operand(), .x_RC = dy.tensor()});
      quantize(s, {.q = xt_q.operand(), .x_RC = x.tensor()});
      Values want = dw.values();
      ref::gemm({.c = want,
                 .a = dy_q.values(s),
                 .b = xt_q.values(s),
                 .m = n,
                 .n = k,
                 .k = padded,
                 .trans_b = true,
                 .accumulate = true});
      gemm(s, {.c_MN = dw.tensor(), .a = dy_q.operand(), .b = xt_q.operand(), .trans_a = true, .accumulate = true});
      testing::expect_close("dw", dw.values(), want, sum, 1e-6);
    }
  });
}

TEST(QuantisedGemm, BlocksEqualTheReferenceOnEachDevice) {
  expect_products_of_reference({ScaleLayout::row_blocks, ScaleLayout::square_blocks, DType::f8_e4m3, DType::f8_e4m3});
}

// x stands for activations, and for gradients in E5M2.
TEST(QuantisedGemm, ScalesOfTensorsEqualTheReferenceOnEachDevice) {
  for (const DType of_x : {DType::f8_e4m3, DType::f8_e5m2})
    expect_products_of_reference({ScaleLayout::per_tensor, ScaleLayout::per_tensor, of_x, DType::f8_e5m2});
}

// A rank may have no tokens: then y has no rows, and dW sums over none.
TEST(QuantisedGemm, WithoutTermsGivesZerosOrKeepsC) {
  const int64_t n = 16, k = 32;
  const ProductFormat blocks{ScaleLayout::row_blocks, ScaleLayout::square_blocks, DType::f8_e4m3, DType::f8_e4m3},
      tensors{ScaleLayout::per_tensor, ScaleLayout::per_tensor, DType::f8_e4m3, DType::f8_e5m2};
  for (const ProductFormat& format : {blocks, tensors}) {
    testing::on_each_device([&](Stream& s) {
      const testing::QuantisedArray dy_q({n, 0}, format.of_dy, format.rows, true),
          xt_q({k, 0}, DType::f8_e4m3, format.weights, true);
      for (const bool accumulate : {false, true}) {
        Array dw = accumulate ? Array::normal({n, k}, DType::f32, 5) : Array::poisoned({n, k}, DType::f32);
        const Values want = accumulate ? dw.values() : Values(n * k, 0.0);
        gemm(
            s,
            {.c_MN = dw.tensor(), .a = dy_q.operand(), .b = xt_q.operand(), .trans_a = true, .accumulate = accumulate});
        EXPECT_EQ(dw.values(), want);
      }
    });
  }
}

TEST(QuantisedGemm, RefusesDataNotQuantisedAlongTheSum) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array c({4, 6}, DType::f32);
  testing::QuantisedArray a({4, 8}, DType::f8_e4m3, ScaleLayout::row_blocks),
      b({8, 6}, DType::f8_e4m3, ScaleLayout::row_blocks);
  EXPECT_EQ(
      testing::error_of([&] { gemm(s, {.c_MN = c.tensor(), .a = a.operand(), .b = b.operand()}); }),
      "gemm: b must be the transposed quantised data of [8, 6], since the product sums along the rows of data; got "
      "f8_e4m3[8, 6] with row_blocks scales f32[8, 1]");
}

// A NaN in one block reaches the sums over it, and no others.
TEST(QuantisedGemm, ANanReachesTheSumsOfItsRow) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Values v(3 * 4, 1.0);
  v[4] = std::nan("");
  Array x = Array::of({3, 4}, DType::f32, v), c({3, 3}, DType::f32);
  testing::QuantisedArray a({3, 4}, DType::f8_e4m3, ScaleLayout::row_blocks),
      b({3, 4}, DType::f8_e4m3, ScaleLayout::row_blocks);
  Array ones = Array::of({3, 4}, DType::f32, Values(12, 1.0));
  quantize(s, {.q = a.operand(), .x_RC = x.tensor()});
  quantize(s, {.q = b.operand(), .x_RC = ones.tensor()});
  gemm(s, {.c_MN = c.tensor(), .a = a.operand(), .b = b.operand(), .trans_b = true});
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(std::isnan(c.values()[i]), i / 3 == 1) << i;
}

TEST(QuantisedGemm, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array x = Array::normal({300, 200}, DType::bf16, 1), c({300, 300}, DType::f32);
    testing::QuantisedArray q({300, 200}, DType::f8_e4m3, ScaleLayout::row_blocks);
    if (s.device() == DeviceKind::cuda) return std::vector<Array>{};  // refused there
    quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
    gemm(s, {.c_MN = c.tensor(), .a = q.operand(), .b = q.operand(), .trans_b = true});
    return std::vector<Array>{c};
  });
}

TEST(Gemm, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    gemm(s,
         {.c_MN = testing::null_tensor({7, 5}), .a = testing::null_tensor({7, 3}), .b = testing::null_tensor({3, 5})});
  });
  EXPECT_EQ(cost.flops, 2 * 7 * 5 * 3);
  EXPECT_EQ(cost.bytes, 4 * (7 * 5 + 7 * 3 + 3 * 5));
}

TEST(Gemm, CublasLtIsFoundWhereItWasBuiltWith) {
  EXPECT_THAT(cublas_lt_text(), ::testing::ContainsRegex(Accelerator::is_built_in() ? "^[0-9]+[.][0-9]+[.][0-9]+$"
                                                                                    : "^not part of this build$"));
}

}  // namespace
}  // namespace moebius
