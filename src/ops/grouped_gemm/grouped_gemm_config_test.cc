#include "ops/grouped_gemm/grouped_gemm_config.h"

#include "ops/cpu/testing.h"
#include "ops/experts/experts_desc.h"

namespace moebius {
namespace {

using testing::null_tensor;

constexpr int64_t R = 24, T = 6, E = 3, D = 40, F = 16;

Rows rows(bool gathers) {
  return {null_tensor({E + 1}, DType::i32), gathers ? null_tensor({R}, DType::i32) : Tensor{}};
}
Tensor bf16_tensor(Shape shape) { return null_tensor(shape, DType::bf16); }

ExpertUp up(bool gathers) {
  return {.h_R2F = bf16_tensor({R, 2 * F}),
          .a_RF = bf16_tensor({R, F}),
          .x_TD = bf16_tensor({gathers ? T : R, D}),
          .w1_e2FD = bf16_tensor({E, 2 * F, D}),
          .rows = rows(gathers)};
}
DExpertDown d_down(bool gathers) {
  return {.sa_RF = bf16_tensor({R, F}),
          .dout_TD = bf16_tensor({gathers ? T : R, D}),
          .w2_eDF = bf16_tensor({E, D, F}),
          .rows = rows(gathers)};
}
const ExpertDown down{.y_RD = bf16_tensor({R, D}), .a_RF = bf16_tensor({R, F}), .w2_eDF = bf16_tensor({E, D, F})};
const DExpertUp d_up{
    .dx_RD = bf16_tensor({R, D}), .dh_R2F = bf16_tensor({R, 2 * F}), .w1_e2FD = bf16_tensor({E, 2 * F, D})};
ExpertWgrad wgrad_w1() {
  return {.dw_eMN = null_tensor({E, 2 * F, D}),
          .left_RM = bf16_tensor({R, 2 * F}),
          .right_RN = bf16_tensor({T, D}),
          .gather_right = true,
          .rows = rows(true)};
}
ExpertWgrad wgrad_w2() {
  return {.dw_eMN = null_tensor({E, D, F}),
          .left_RM = bf16_tensor({T, D}),
          .right_RN = bf16_tensor({R, F}),
          .gather_left = true,
          .rows = rows(true)};
}

TEST(GroupedGemmDesc, PrintsTheProductOfEachOp) {
  EXPECT_EQ(to_string(describe(up(true))),
            "24 x 32 x 40, 3 experts, bf16, A gathered, B transposed, epilogue gated_activation");
  EXPECT_EQ(to_string(describe(up(false))), "24 x 32 x 40, 3 experts, bf16, B transposed, epilogue gated_activation");
  EXPECT_EQ(to_string(describe(down)), "24 x 40 x 16, 3 experts, bf16, B transposed, epilogue store");
  EXPECT_EQ(to_string(describe(d_down(true))),
            "24 x 16 x 40, 3 experts, bf16, A gathered, epilogue gated_activation_bwd");
  EXPECT_EQ(to_string(describe(d_up)), "24 x 40 x 32, 3 experts, bf16, epilogue store");
  EXPECT_EQ(to_string(describe(wgrad_w1())),
            "32 x 40 x 24, 3 experts, bf16, B gathered, A transposed, epilogue add_f32");
  EXPECT_EQ(to_string(describe(wgrad_w2())),
            "40 x 16 x 24, 3 experts, bf16, A gathered, A transposed, epilogue add_f32");
}

TEST(GroupedGemmDesc, NamesBothOperandsWhereTheyDifferOrHaveScales) {
  ExpertDown a = down;
  a.w2_eDF = Operand(null_tensor({E, D, F}, DType::f32));
  EXPECT_EQ(to_string(describe(a)), "24 x 40 x 16, 3 experts, bf16 by f32, B transposed, epilogue store");
  a.w2_eDF = Operand(bf16_tensor({E, D, F}), null_tensor({E, 1, 1}), ScaleLayout::square_blocks);
  EXPECT_EQ(to_string(describe(a)),
            "24 x 40 x 16, 3 experts, bf16 by bf16 with square_blocks, B transposed, epilogue store");
}

TEST(GroupedGemmConfig, IsChosenByTheDesc) {
  EXPECT_EQ(choose_config(describe(up(true))), kSm90GatheredRows);
  EXPECT_EQ(choose_config(describe(up(false))), kSm90Rows);
  EXPECT_EQ(choose_config(describe(down)), kSm90Rows);
  EXPECT_EQ(choose_config(describe(d_down(true))), kSm90Rows);
  EXPECT_EQ(choose_config(describe(d_down(false))), kSm90Rows);
  EXPECT_EQ(choose_config(describe(d_up)), kSm90Rows);
  EXPECT_EQ(choose_config(describe(wgrad_w1())), kSm90Wgrad);
  EXPECT_EQ(choose_config(describe(wgrad_w2())), kSm90Wgrad);
}

TEST(GroupedGemmConfig, IsChosenByTheFormat) {
  const auto quantised = [](const Operand& x, ScaleLayout layout) {
    return Operand(null_tensor(x.data.shape, DType::f8_e4m3), null_tensor(scale_shape(layout, x.data.shape)), layout);
  };
  for (const bool gathers : {true, false}) {
    const GroupedGemmConfig& expected = gathers ? kSm90GatheredRowsF8 : kSm90RowsF8;
    ExpertUp a = up(gathers);
    a.x_TD = quantised(a.x_TD, ScaleLayout::row_blocks);
    EXPECT_EQ(choose_config(describe(a)), expected);
    DExpertDown b = d_down(gathers);
    b.dout_TD = quantised(b.dout_TD, ScaleLayout::row_blocks);
    EXPECT_EQ(choose_config(describe(b)), expected);
  }
  ExpertWgrad w = wgrad_w1();
  w.left_RM = quantised(w.left_RM, ScaleLayout::row_blocks);
  EXPECT_EQ(choose_config(describe(w)), kSm90WgradF8);
}

TEST(GroupedGemmConfig, IsPrintedWhole) {
  EXPECT_EQ(to_string(kSm90Rows),
            "tiles 128 x 256 x 64, 4 slots, 4 notes, clusters of 2, 384 threads, registers 40 and 232, L2 groups of 8");
  EXPECT_EQ(to_string(kSm90GatheredRows),
            "tiles 128 x 256 x 64, 4 slots, 4 notes, clusters of 2, 384 threads, registers 56 and 224, L2 groups of 8");
  EXPECT_EQ(to_string(kSm90Wgrad),
            "tiles 128 x 256 x 64, 4 slots, 4 notes, clusters of 2, 384 threads, registers 56 and 224, L2 groups of 4");
}

// A multiprocessor of Hopper has 64 Ki registers and 227 KiB of shared memory for a block.
TEST(GroupedGemmConfig, FitsAMultiprocessor) {
  for (const GroupedGemmConfig& c :
       {kSm90Rows, kSm90GatheredRows, kSm90Wgrad, kSm90RowsF8, kSm90GatheredRowsF8, kSm90WgradF8}) {
    SCOPED_TRACE(to_string(c));
    EXPECT_LE(128 * (c.producer_registers + c.num_consumers() * c.consumer_registers), 64 << 10);
    EXPECT_EQ(c.producer_registers % 8 + c.consumer_registers % 8, 0);
    EXPECT_EQ(c.tile_m, 64 * c.num_consumers());
    constexpr int kStagingBytesWarp = 4096;
    EXPECT_LE(c.num_slots * (c.slot_bytes_a() + c.slot_bytes_b()) + 4 * c.num_consumers() * kStagingBytesWarp,
              227 << 10);
  }
}

TEST(GroupedGemmConfig, RunsTheKernelThatWasCompiledForIt) {
  std::vector<std::string> ran;
  const auto body = [&]<GroupedGemmConfig kConfig>() { ran.push_back(to_string(kConfig)); };
  with_config<kSm90Rows, kSm90GatheredRows>(kSm90GatheredRows, "op", body);
  EXPECT_EQ(ran, std::vector{to_string(kSm90GatheredRows)});
  EXPECT_EQ(testing::error_of([&] { with_config<kSm90Rows>(kSm90Wgrad, "op", body); }),
            "op: no kernel was compiled for " + to_string(kSm90Wgrad) + "; add the config to the op's list");
}

}  // namespace
}  // namespace moebius
