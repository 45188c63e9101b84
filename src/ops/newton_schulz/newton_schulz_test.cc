#include "ops/newton_schulz/newton_schulz.h"

#include "ops/cpu/testing.h"
#include "ops/newton_schulz/newton_schulz_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t M, N;
  DType compute = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType compute : {DType::f32, DType::bf16})
    for (const auto& [M, N] : {std::pair<int64_t, int64_t>{1, 1}, {2, 7}, {7, 2}, {16, 16}, {13, 40}, {129, 33}})
      all.push_back({M, N, compute});
  return all;
}

// u is one matrix, or a batch of matrices.
Array orthogonalised(Stream& s, Array& u, Shape shape, DType compute, float factor) {
  const Shape batch = shape.rank() == 2 ? Shape{1, shape[0], shape[1]} : shape;
  Array o = Array::poisoned(shape, DType::f32);
  Array scratch({NewtonSchulz::scratch_bytes(batch, compute)}, DType::u8);
  newton_schulz(s, {.o_BMN = o.tensor().view(batch),
                    .u_BMN = u.tensor().view(batch),
                    .scratch = scratch.tensor(),
                    .factor = factor,
                    .compute = compute});
  return o;
}

class NewtonSchulzTest : public testing::DeviceTest<Case> {
 protected:
  const Case c_ = c();
  const Shape shape_{c_.M, c_.N};
};
INSTANTIATE_TEST_SUITE_P(Shapes, NewtonSchulzTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// A step of the iteration multiplies an error of a small singular value by at most 3.45, and its products have sums of
// r = min(M, N) terms: 5 steps add up to less than 5 * 3.45 * (1 + sqrt(r)) roundings, on average far fewer.
TEST_P(NewtonSchulzTest, EqualsTheReference) {
  Array u = Array::normal(shape_, DType::f32, 1, 1e-3);
  const Values got = orthogonalised(s_, u, shape_, c_.compute, 0.25f).values();
  const double r = static_cast<double>(std::min(c_.M, c_.N));
  const double tolerance = 5 * 3.45 * (1 + std::sqrt(r)) * testing::epsilon(c_.compute);
  testing::expect_close("o", got, ref::newton_schulz(u.values(), c_.M, c_.N, 0.25), tolerance, 1e-7);
}

// In place, and whatever the size of u: a power of two changes no bit.
TEST_P(NewtonSchulzTest, DependsOnlyOnTheDirection) {
  Array u = Array::normal(shape_, DType::f32, 1), larger = Array::normal(shape_, DType::f32, 1, 0x1p20);
  const Values one = orthogonalised(s_, u, shape_, c_.compute, 1).values();
  testing::expect_close("o", orthogonalised(s_, larger, shape_, c_.compute, 1).values(), one,
                        8 * testing::epsilon(c_.compute), 1e-6);
  const Shape batch{1, c_.M, c_.N};
  Array scratch({NewtonSchulz::scratch_bytes(batch, c_.compute)}, DType::u8);
  const Tensor in_place = u.tensor().view(batch);
  newton_schulz(s_, {.o_BMN = in_place, .u_BMN = in_place, .scratch = scratch.tensor(), .compute = c_.compute});
  EXPECT_EQ(u.values(), one) << "in place";
}

// Other matrices of the batch, of any size and direction, change no bit. On a GPU the algorithm of the products
// included, which the first batch chooses.
TEST_P(NewtonSchulzTest, ABatchHasTheBitsOfEachMatrix) {
  constexpr int64_t B = 5;
  const size_t n = static_cast<size_t>(c_.M * c_.N);
  Array u = Array::normal({B, c_.M, c_.N}, DType::f32, 1, 1e-3);
  const Values all = u.values(), got = orthogonalised(s_, u, {B, c_.M, c_.N}, c_.compute, 0.25f).values();
  for (size_t i = 0; i < size_t{B}; ++i) {
    const auto part = [&](const Values& of) {
      return Values(of.begin() + static_cast<int64_t>(i * n), of.begin() + static_cast<int64_t>((i + 1) * n));
    };
    Array one = Array::of(shape_, DType::f32, part(all));
    EXPECT_EQ(orthogonalised(s_, one, shape_, c_.compute, 0.25f).values(), part(got)) << "matrix " << i;
  }
}

// Rows of a wide matrix of normal draws are far from dependent: they end near orthonormal.
TEST(NewtonSchulz, RowsBecomeNearlyOrthonormal) {
  testing::on_each_device([](Stream& s) {
    constexpr int64_t M = 8, N = 200;
    Array u = Array::normal({M, N}, DType::f32, 3);
    const Values o = orthogonalised(s, u, {M, N}, DType::f32, 1).values();
    const Values square = ref::product(o, ref::transposed(o, M, N), M, N, M);
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < M; ++j)
        EXPECT_NEAR(square[static_cast<size_t>(i * M + j)], i == j ? 0.95 : 0, 0.5) << i << " " << j;
  });
}

TEST(NewtonSchulz, ZeroStaysZeroAndNanSpreads) {
  testing::on_each_device([](Stream& s) {
    Array zero = Array::of({3, 5}, DType::f32, Values(15, 0.0));
    EXPECT_EQ(orthogonalised(s, zero, {3, 5}, DType::bf16, 1).values(), Values(15, 0.0));
    Array nan = Array::normal({3, 5}, DType::f32, 1);
    nan.tensor().ptr<float>()[4] = NAN;
    for (const double v : orthogonalised(s, nan, {3, 5}, DType::f32, 1).values()) EXPECT_TRUE(std::isnan(v));
  });
}

TEST(NewtonSchulz, BitsDoNotDependOnThreads) {
  Array u = Array::normal({65, 130}, DType::f32, 1);
  for (const DType compute : {DType::f32, DType::bf16})
    testing::expect_same_bits_for_any_team([&](Stream& s) {
      return std::vector{orthogonalised(s, u, {65, 130}, compute, 1)};
    });
}

TEST(AddScaled, AddsInEveryPairOfDtypes) {
  testing::on_each_device([](Stream& s) {
    for (const DType of_x : {DType::f32, DType::bf16}) {
      for (const DType of_z : {DType::f32, DType::bf16}) {
        Array x = Array::of({3}, of_x, {1, -2, 4}), y = Array::of({3}, of_z, {8, 16, -32}), z({3}, of_z);
        Array sum = Array::of({3}, DType::f64, {16, 4, 64});
        add_scaled(s, {.z = z.tensor(), .x = x.tensor(), .y = y.tensor(), .a = 3, .b = 0.5f});
        EXPECT_EQ(z.values(), (Values{7, 2, -4}));
        add_scaled(s, {.z = y.tensor(), .x = x.tensor(), .sum_squares_B = sum.tensor(), .a = 2});
        testing::expect_close("normalised", y.values(), {0.5, -2, 1}, 1e-6 + testing::epsilon(of_z), 0);
      }
    }
  });
}

TEST(NewtonSchulz, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array u({1, 3, 4}, DType::f32), o({1, 4, 3}, DType::f32), few({8}, DType::u8), ints({3, 4}, DType::i32);
  EXPECT_EQ(
      testing::error_of([&] { newton_schulz(s, {.o_BMN = o.tensor(), .u_BMN = u.tensor(), .scratch = few.tensor()}); }),
      "newton_schulz: o must be f32[1, 3, 4]; got f32[1, 4, 3]");
  EXPECT_EQ(
      testing::error_of([&] { newton_schulz(s, {.o_BMN = u.tensor(), .u_BMN = u.tensor(), .scratch = few.tensor()}); }),
      "newton_schulz: scratch must have 1536 bytes; got 8");
  EXPECT_EQ(testing::error_of([&] { add_scaled(s, {.z = u.tensor(), .x = ints.tensor()}); }),
            "add_scaled: x must be f32 or bf16; got i32[3, 4]");
}

TEST(AddScaled, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({3, 4});
    add_scaled(s, {.z = x, .x = x, .y = x});
  });
  EXPECT_EQ(cost.bytes, 4 * 12 * 3);
}

}  // namespace
}  // namespace moebius
