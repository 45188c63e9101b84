#include "ops/activation/activation.h"

#include "ops/activation/activation_ref.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t rows, width;
  DType dtype;
};

class SwigluTest : public testing::DeviceTest<Case> {};

TEST_P(SwigluTest, EqualsTheReference) {
  const auto [rows, width, dtype] = c();
  Array h = Array::normal({rows, 2 * width}, dtype, 1, 4), da = Array::normal({rows, width}, dtype, 2);
  Array a = Array::poisoned({rows, width}, dtype), again = a, dh = Array::poisoned({rows, 2 * width}, dtype),
        dh_alone = dh;
  swiglu_fwd(s_, {.a_TF = a.tensor(), .h_T2F = h.tensor()});
  swiglu_bwd(s_, {.dh_T2F = dh.tensor(), .a_TF = again.tensor(), .da_TF = da.tensor(), .h_T2F = h.tensor()});
  swiglu_bwd(s_, {.dh_T2F = dh_alone.tensor(), .da_TF = da.tensor(), .h_T2F = h.tensor()});
  // One rounding to the dtype, about ten operations and an exponential of 2 ulp in f32.
  const double error = testing::epsilon(dtype) + 12 * testing::epsilon(DType::f32);
  testing::expect_close("a", a.values(), ref::swiglu_fwd(h.values(), width), error, 1e-7);
  testing::expect_close("dh", dh.values(), ref::swiglu_bwd(da.values(), h.values(), width), error, 1e-7);
  EXPECT_EQ(again.bytes(), a.bytes());
  EXPECT_EQ(dh_alone.bytes(), dh.bytes());
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [rows, width] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {1, 1}, {5, 7}, {67, 33}, {70, 48}}) {
      all.push_back({rows, width, dtype});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, SwigluTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST(Swiglu, ReferenceBackwardEqualsFiniteDifferences) {
  const Values h = Array::normal({3, 10}, DType::f32, 1, 2).values(),
               da = Array::normal({3, 5}, DType::f32, 2).values();
  testing::expect_gradient(
      "dh", [&](const Values& v) { return testing::dot(da, ref::swiglu_fwd(v, 5)); }, h, ref::swiglu_bwd(da, h, 5));
}

TEST(Swiglu, LargeGatesNeitherOverflowNorGiveNaN) {
  testing::on_each_device([](Stream& s) {
    Array h = Array::of({1, 4}, DType::f32, {-1e4, 1e4, 1, 1}), a = Array::poisoned({1, 2}, DType::f32);
    swiglu_fwd(s, {.a_TF = a.tensor(), .h_T2F = h.tensor()});
    EXPECT_NEAR(a.values()[0], 0, 1e-30);
    EXPECT_EQ(a.values()[1], 1e4);
  });
}

TEST(Swiglu, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array h = Array::normal({67, 34}, DType::bf16, 1), a({67, 17}, DType::bf16), dh({67, 34}, DType::bf16);
    swiglu_fwd(s, {.a_TF = a.tensor(), .h_T2F = h.tensor()});
    swiglu_bwd(s, {.dh_T2F = dh.tensor(), .da_TF = a.tensor(), .h_T2F = h.tensor()});
    return std::vector<Array>{a, dh};
  });
}

TEST(Swiglu, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array odd({2, 5}, DType::f32), h({2, 6}, DType::f32), a({2, 2}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { swiglu_fwd(s, {.a_TF = a.tensor(), .h_T2F = odd.tensor()}); }),
            "swiglu_fwd: h must be f32 or bf16 [T, 2 F]; got f32[2, 5]");
  EXPECT_EQ(testing::error_of([&] { swiglu_fwd(s, {.a_TF = a.tensor(), .h_T2F = h.tensor()}); }),
            "swiglu_fwd: a must be f32[2, 3]; got f32[2, 2]");
  EXPECT_EQ(testing::error_of([&] { swiglu_bwd(s, {.dh_T2F = h.tensor(), .da_TF = a.tensor(), .h_T2F = h.tensor()}); }),
            "swiglu_bwd: da must be f32[2, 3]; got f32[2, 2]");
}

TEST(Swiglu, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    swiglu_fwd(s, {.a_TF = testing::null_tensor({3, 4}), .h_T2F = testing::null_tensor({3, 8})});
    swiglu_bwd(s, {.dh_T2F = testing::null_tensor({3, 8}),
                   .da_TF = testing::null_tensor({3, 4}),
                   .h_T2F = testing::null_tensor({3, 8})});
  });
  EXPECT_EQ(cost.flops, 15 * 12);
  EXPECT_EQ(cost.bytes, 4 * (12 + 24) + 4 * (24 + 24 + 12));
}

}  // namespace
}  // namespace moebius
