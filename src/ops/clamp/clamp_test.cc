#include "ops/clamp/clamp.h"

#include <limits>

#include "ops/clamp/clamp_ref.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t rows, width;
  float limit;
  DType dtype = DType::f32;
};

// Limits that some elements of a normal draw are beyond: many, few, none. 0.7 is between two
// values of bf16.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : {Case{0, 3, 0.7f}, Case{1, 1, 0.7f}, Case{7, 13, 0.7f}, Case{5, 64, 0.25f}, Case{300, 257, 1.5f},
                   Case{19, 7, 100.0f}}) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

class ClampTest : public testing::DeviceTest<Case> {
 protected:
  const Case c_ = c();
  const Shape shape_{c_.rows, c_.width};
  const double limit_ = Array::of({1}, c_.dtype, {c_.limit}).values()[0];  // as the dtype holds it
};
INSTANTIATE_TEST_SUITE_P(Shapes, ClampTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(ClampTest, EqualsTheReferenceExactly) {
  Array x = Array::normal(shape_, c_.dtype, 1), y = Array::poisoned(shape_, c_.dtype);
  const Values want = ref::clamp_fwd(x.values(), limit_);
  clamp_fwd(s_, {.y = y.tensor(), .x = x.tensor(), .limit = c_.limit});
  EXPECT_EQ(y.values(), want);
  clamp_fwd(s_, {.y = x.tensor(), .x = x.tensor(), .limit = c_.limit});
  EXPECT_EQ(x.values(), want) << "in place";
}

TEST_P(ClampTest, GradientsPassWhereNothingWasCut) {
  Array x = Array::normal(shape_, c_.dtype, 1), dy = Array::normal(shape_, c_.dtype, 2),
        dx = Array::poisoned(shape_, c_.dtype);
  const Values want = ref::clamp_bwd(dy.values(), x.values(), limit_);
  clamp_bwd(s_, {.dx = dx.tensor(), .dy = dy.tensor(), .x = x.tensor(), .limit = c_.limit});
  EXPECT_EQ(dx.values(), want);
  clamp_bwd(s_, {.dx = dy.tensor(), .dy = dy.tensor(), .x = x.tensor(), .limit = c_.limit});
  EXPECT_EQ(dy.values(), want) << "in place";
}

// At the limit nothing is cut; it is the limit of the dtype, which 0.7 is not.
TEST(Clamp, TheLimitItselfPassesAndNanStays) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    testing::on_each_device([&](Stream& s) {
      const double limit = Array::of({1}, dtype, {0.7}).values()[0];
      Array x = Array::of({6}, dtype, {limit, -limit, inf, -inf, 0, nan}), dy = Array::of({6}, dtype, Values(6, 3.0));
      Array y = Array::poisoned({6}, dtype), dx = Array::poisoned({6}, dtype);
      clamp_fwd(s, {.y = y.tensor(), .x = x.tensor(), .limit = 0.7f});
      clamp_bwd(s, {.dx = dx.tensor(), .dy = dy.tensor(), .x = x.tensor(), .limit = 0.7f});
      Values cut = y.values();
      EXPECT_TRUE(std::isnan(cut.back()));
      cut.pop_back();
      EXPECT_EQ(cut, (Values{limit, -limit, limit, -limit, 0}));
      EXPECT_EQ(dx.values(), (Values{3, 3, 0, 0, 3, 0}));
    });
  }
}

TEST(Clamp, ReferenceBackwardEqualsFiniteDifferences) {
  const Values x = Array::normal({5, 7}, DType::f32, 1).values(), dy = Array::normal({5, 7}, DType::f32, 2).values();
  testing::expect_gradient(
      "dx", [&](const Values& at) { return testing::dot(dy, ref::clamp_fwd(at, 0.5)); }, x, ref::clamp_bwd(dy, x, 0.5));
}

TEST(Clamp, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 3}, DType::f32), y({3, 4}, DType::f32), ints({4, 3}, DType::i32);
  const auto forward = [&](Array& to, Array& from, float limit) {
    return testing::error_of([&] { clamp_fwd(s, {.y = to.tensor(), .x = from.tensor(), .limit = limit}); });
  };
  EXPECT_EQ(forward(y, x, 1.0f), "clamp_fwd: y must be f32[4, 3]; got f32[3, 4]");
  EXPECT_EQ(forward(ints, ints, 1.0f), "clamp_fwd: x must be f32 or bf16; got i32[4, 3]");
  EXPECT_EQ(forward(x, x, 0.0f), "clamp_fwd: limit must be above 0 and finite; got 0");
  EXPECT_EQ(
      testing::error_of([&] { clamp_bwd(s, {.dx = x.tensor(), .dy = y.tensor(), .x = x.tensor(), .limit = 1.0f}); }),
      "clamp_bwd: dy must be f32[4, 3]; got f32[3, 4]");
}

TEST(Clamp, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({3, 4});
    clamp_fwd(s, {.y = x, .x = x, .limit = 1.0f});
    clamp_bwd(s, {.dx = x, .dy = x, .x = x, .limit = 1.0f});
  });
  EXPECT_EQ(cost.bytes, 4 * 12 * (2 + 3));
}

}  // namespace
}  // namespace moebius
