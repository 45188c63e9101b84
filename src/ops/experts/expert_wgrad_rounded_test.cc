// expert_wgrad into a dw in bf16.
#include <gmock/gmock.h>

#include <optional>

#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "ops/experts/experts_testing.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {
namespace {

using testing::Array;
using testing::ExpertProblem;
using testing::run_expert_op;
using Case = testing::ExpertCase;

// So many experts of one to three steps of rows that a GPU's kernels cut tiles in two.
std::vector<int64_t> many_experts() {
  std::vector<int64_t> counts(60);
  for (int64_t e = 0; e < std::ssize(counts); ++e) counts[e] = 20 + 37 * e % 140;
  return counts;
}

std::vector<Case> cases() {
  const DType dtype = DType::bf16;
  return {{"odd", 9, 33, 17, {0, 5, 1, 0, 17, 14}, 3, true, dtype},
          {"all_empty", 3, 64, 64, {0, 0}, 0, true, dtype},
          {"narrow", 70, 8, 8, {65, 0, 5}, 0, true, dtype},
          {"tiles", 150, 200, 136, {0, 130, 3, 257, 64}, 5, true, dtype},
          {"tiles_in_place", 150, 136, 328, {129, 0, 40}, 5, false, dtype},
          {"many_steps", 500, 512, 256, {1500, 0, 1000, 65}, 0, true, dtype},
          {"many_steps_in_place", 500, 520, 264, {1500, 0, 1000, 65}, 3, false, dtype},
          {"cut", 40, 264, 264, many_experts(), 5, true, dtype},
          {"cut_in_place", 40, 264, 264, many_experts(), 5, false, dtype}};
}

class ExpertWgradRoundedTest : public testing::DeviceTest<Case> {};

ExpertWgrad wgrad_of(ExpertProblem& p, bool of_w1, const Tensor& dw, bool accumulate) {
  if (of_w1)
    return {.dw_eMN = dw,
            .left_RM = p.h.tensor(),
            .right_RN = p.x.tensor(),
            .gather_right = p.c.gather,
            .accumulate = accumulate,
            .rows = p.rows()};
  return {.dw_eMN = dw,
          .left_RM = p.dout.tensor(),
          .right_RN = p.a.tensor(),
          .gather_left = p.c.gather,
          .accumulate = accumulate,
          .rows = p.rows()};
}

void tell_differences(const testing::Values& got, const testing::Values& want) {
  size_t first = got.size();
  int64_t num = 0;
  for (size_t i = got.size(); i-- > 0;)
    if (got[i] != want[i]) first = i, ++num;
  ADD_FAILURE() << num << " of " << got.size() << " elements differ"
                << (num == 0 ? std::string(" in the sign of zero")
                             : fmt::format(", the first at {}: {}, expected {}", first, got[first], want[first]));
}

// Both add to the same values, or store over NaN.
TEST_P(ExpertWgradRoundedTest, HasTheBitsOfASeparateRoundingPass) {
  const bool on_gpu = s_.device() == DeviceKind::cuda;
  if (on_gpu && !uses_hopper_kernels(s_)) GTEST_SKIP() << "only kernels of Hopper GPUs round";
  if (on_gpu && c().D % 8 + c().F % 8 != 0) GTEST_SKIP() << "columns are not multiples of 8";
  ExpertProblem p(c());
  for (const int blocks : {0, 2, 7, 116}) {
    if (blocks > 0 && !on_gpu) break;
    std::optional<BlockLimitScope> few;
    if (blocks > 0) few.emplace(s_, blocks);
    for (const bool of_w1 : {true, false}) {
      for (const bool accumulate : {true, false}) {
        SCOPED_TRACE(fmt::format("{} blocks, dw{}{}", blocks, of_w1 ? 1 : 2, accumulate ? " added" : ""));
        const Shape shape = of_w1 ? Shape{p.E(), 2 * c().F, c().D} : Shape{p.E(), c().D, c().F};
        const Array before =
            accumulate ? Array::normal(shape, DType::bf16, 20, 30) : Array::poisoned(shape, DType::bf16);
        Array wide = Array::poisoned(shape, DType::f32), sum = before, fused = before;
        run_expert_op(s_, expert_wgrad, wgrad_of(p, of_w1, wide.tensor(), false));
        const Shape n{shape.numel()};
        sum_gradient(s_, {.sum_n = sum.tensor().view(n), .grad_n = wide.tensor().view(n), .adds = accumulate});
        run_expert_op(s_, expert_wgrad, wgrad_of(p, of_w1, fused.tensor(), accumulate));
        if (fused.bytes() != sum.bytes()) tell_differences(fused.values(), sum.values());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertWgradRoundedTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });

TEST(ExpertWgradRounded, NeedsOperandsInBf16) {
  testing::on_each_device([](Stream& s) {
    ExpertProblem p({.name = "f32", .T = 9, .D = 8, .F = 8, .counts = {5, 4}});
    Array dw = Array::poisoned({2, 16, 8}, DType::bf16);
    EXPECT_EQ(testing::error_of([&] { run_expert_op(s, expert_wgrad, wgrad_of(p, true, dw.tensor(), false)); }),
              "expert_wgrad: dw must be f32[2, 16, 8]; got bf16[2, 16, 8]");
  });
}

}  // namespace
}  // namespace moebius
