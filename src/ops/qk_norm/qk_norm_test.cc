#include "ops/qk_norm/qk_norm.h"

#include "ops/cpu/testing.h"
#include "ops/qk_norm/qk_norm_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

constexpr double kEps = 1e-3;

struct Operands {
  Array x, dy, q_norm, k_norm;
  Operands(int64_t rows, int64_t A, int64_t B, DType dtype)
      : x(Array::normal({rows, A + 2 * B}, dtype, 1)),
        dy(Array::normal({rows, A + 2 * B}, dtype, 2)),
        q_norm(Array::normal({A}, dtype, 3)),
        k_norm(Array::normal({B}, dtype, 4)) {}
};

// dx, dq_norm, dk_norm, which start at what `start` draws.
std::vector<Array> backward(Stream& s, Operands& in, DType dtype, bool start) {
  const Shape shape = in.x.tensor().shape;
  const int64_t A = in.q_norm.tensor().numel(), B = in.k_norm.tensor().numel(),
                P = QkNormBwd::num_partials(shape[0], A, B, s);
  Array dx = Array::poisoned(shape, dtype), partial = Array::poisoned({P, A + B}, DType::f32);
  Array dq = Array::normal({A}, DType::f32, 5, start), dk = Array::normal({B}, DType::f32, 6, start);
  qk_norm_bwd(s, {.dx_TC = dx.tensor(),
                  .dq_norm_A = dq.tensor(),
                  .dk_norm_B = dk.tensor(),
                  .partial_PW = partial.tensor(),
                  .dy_TC = in.dy.tensor(),
                  .x_TC = in.x.tensor(),
                  .q_norm_A = in.q_norm.tensor(),
                  .k_norm_B = in.k_norm.tensor(),
                  .eps = static_cast<float>(kEps)});
  return {dx, dq, dk};
}

struct Case {
  int64_t rows, A, B;
  DType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [rows, A, B] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
             {0, 6, 2}, {1, 1, 1}, {3, 10, 4}, {67, 12, 12}, {131, 65, 33}, {300, 1056, 64}, {5, 64, 4}, {3, 8200, 8}})
      all.push_back({rows, A, B, dtype});
  }
  return all;
}

class QkNormTest : public testing::DeviceTest<Case> {};

TEST_P(QkNormTest, EqualsTheReference) {
  const auto [rows, A, B, dtype] = c();
  Operands in(rows, A, B, dtype);
  Array y = Array::poisoned(in.x.tensor().shape, dtype);
  qk_norm_fwd(s_, {.y_TC = y.tensor(),
                   .x_TC = in.x.tensor(),
                   .q_norm_A = in.q_norm.tensor(),
                   .k_norm_B = in.k_norm.tensor(),
                   .eps = static_cast<float>(kEps)});
  // The error is as in rms_norm: roundings to the dtype, and f32 sums of A squares and
  // of `rows` terms.
  const double eps32 = testing::epsilon(DType::f32), error = 3 * testing::epsilon(dtype) + eps32 * std::sqrt(A);
  testing::expect_close("y", y.values(), ref::qk_norm_fwd(in.x.values(), in.q_norm.values(), in.k_norm.values(), kEps),
                        error, 1e-7);
  const ref::QkNormGrads want =
      ref::qk_norm_bwd(in.dy.values(), in.x.values(), in.q_norm.values(), in.k_norm.values(), kEps);
  const std::vector<Array> got = backward(s_, in, dtype, /*start=*/false);
  const double sums = 8 * eps32 * std::sqrt(static_cast<double>(A + rows));
  testing::expect_close("dx", got[0].values(), want.dx, testing::epsilon(dtype) + sums, 1e-5);
  testing::expect_close("dq_norm", got[1].values(), want.dq_norm, sums, 1e-5);
  testing::expect_close("dk_norm", got[2].values(), want.dk_norm, sums, 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Shapes, QkNormTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// A GPU has a kernel of its own for few rows.
TEST(QkNorm, RowsDoNotDependOnOtherRows) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const auto& [A, B] : std::vector<std::pair<int64_t, int64_t>>{{65, 33}, {1056, 64}, {64, 2080}}) {
        Operands in(67, A, B, dtype);
        const auto norm = [&](int64_t begin, int64_t end) {
          Array y = Array::poisoned({end - begin, A + 2 * B}, dtype);
          qk_norm_fwd(s, {.y_TC = y.tensor(),
                          .x_TC = in.x.tensor().rows(begin, end),
                          .q_norm_A = in.q_norm.tensor(),
                          .k_norm_B = in.k_norm.tensor(),
                          .eps = static_cast<float>(kEps)});
          return y.values();
        };
        const Values all = norm(0, 67), few = norm(7, 11);
        EXPECT_TRUE(std::equal(few.begin(), few.end(), all.begin() + 7 * (A + 2 * B))) << A << ", " << B;
      }
    }
  });
}

TEST(QkNorm, WeightGradientsAccumulate) {
  testing::on_each_device([](Stream& s) {
    Operands in(7, 6, 4, DType::f32);
    const std::vector<Array> alone = backward(s, in, DType::f32, false), onto = backward(s, in, DType::f32, true);
    for (const int i : {1, 2}) {
      Values want = Array::normal(Shape{i == 1 ? 6 : 4}, DType::f32, 4 + i).values();
      for (size_t j = 0; j < want.size(); ++j) want[j] += alone[i].values()[j];
      testing::expect_close("sum", onto[i].values(), want, testing::epsilon(DType::f32), 0);
    }
  });
}

TEST(QkNorm, ReferenceBackwardEqualsFiniteDifferences) {
  Operands in(3, 4, 2, DType::f32);
  const Values x = in.x.values(), dy = in.dy.values(), q = in.q_norm.values(), k = in.k_norm.values();
  const ref::QkNormGrads grads = ref::qk_norm_bwd(dy, x, q, k, kEps);
  const auto loss = [&](const Values& x_at, const Values& q_at, const Values& k_at) {
    return testing::dot(dy, ref::qk_norm_fwd(x_at, q_at, k_at, kEps));
  };
  testing::expect_gradient(
      "dx", [&](const Values& at) { return loss(at, q, k); }, x, grads.dx);
  testing::expect_gradient(
      "dq_norm", [&](const Values& at) { return loss(x, at, k); }, q, grads.dq_norm);
  testing::expect_gradient(
      "dk_norm", [&](const Values& at) { return loss(x, q, at); }, k, grads.dk_norm);
}

TEST(QkNorm, SameBitsForAnyTeam) {
  Operands in(131, 12, 6, DType::bf16);
  testing::expect_same_bits_for_any_team([&](Stream& s) { return backward(s, in, DType::bf16, true); });
}

TEST(QkNorm, RefusesMismatchedShapes) {
  ThreadPool pool(1);
  Stream s(DeviceKind::null, pool);
  const auto fwd = [&](Shape x, Shape q, Shape k) {
    return testing::error_of([&] {
      qk_norm_fwd(s, {.y_TC = testing::null_tensor(x),
                      .x_TC = testing::null_tensor(x),
                      .q_norm_A = testing::null_tensor(q),
                      .k_norm_B = testing::null_tensor(k)});
    });
  };
  EXPECT_EQ(fwd({3, 10}, {4}, {3}), "no error");
  EXPECT_NE(fwd({3, 9}, {4}, {3}).find("qk_norm_fwd: x must be f32[3, 10]; got f32[3, 9]"), std::string::npos);
  EXPECT_NE(fwd({3, 10}, {0}, {5}).find("q_norm and k_norm must have elements; got f32[0]"), std::string::npos);
  EXPECT_NE(fwd({10}, {4}, {3}).find("x must be f32 or bf16 [T, A + 2 B]; got f32[10]"), std::string::npos);
}

}  // namespace
}  // namespace moebius
