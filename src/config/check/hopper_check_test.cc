#include "config/check/hopper_check.h"

#include <gmock/gmock.h>

#include "core/error.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;

std::string refusal(const HopperNeeds& needs, int major, int minor) {
  try {
    check_hopper_needs(needs, major, minor);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "";
}

TEST(HopperCheck, NamesTheKeyOnOtherGpus) {
  const HopperNeeds blocks{.recipe = PrecisionRecipe::fp8_block}, fuses{.fuses_grad = true},
      splits{.splits_batch = true};
  EXPECT_THAT(refusal(blocks, 10, 0),
              HasSubstr("precision.recipe = \"fp8_block\" needs a GPU of compute capability 9.0; "
                        "this one has 10.0; set precision.recipe = \"none\""));
  EXPECT_THAT(refusal(fuses, 12, 0), HasSubstr("optimizer.fuse_grad = true needs the kernels of a GPU of compute "
                                               "capability 9.0; this one has 12.0, and run.kernels is \"auto\""));
  EXPECT_THAT(refusal(splits, 8, 9), HasSubstr("got one of 8.9, with run.kernels = \"auto\"; set "
                                               "parallel.expert_overlap to \"layer\" or \"none\""));
  for (const HopperNeeds& needs : {blocks, fuses, splits}) EXPECT_EQ(refusal(needs, 9, 0), "");
  EXPECT_EQ(refusal({.recipe = PrecisionRecipe::fp8_tensor}, 10, 0), "");
  EXPECT_THAT(refusal({.fuses_grad = true, .kernels = KernelChoice::portable}, 9, 0),
              HasSubstr("run.kernels is \"portable\""));
}

TEST(HopperCheck, RunsOnACpuNeedNoKernelsOfAGpu) {
  RunSpec run;
  run.precision.recipe = PrecisionRecipe::fp8_block, run.optimizer.fuse_grad = true;
  run.device = DeviceKind::cpu;
  EXPECT_FALSE(hopper_needs(run).fuses_grad);
  EXPECT_EQ(hopper_needs(run).recipe, PrecisionRecipe::none);
  run.device = DeviceKind::cuda;
  EXPECT_TRUE(hopper_needs(run).fuses_grad);
  EXPECT_EQ(hopper_needs(run).recipe, PrecisionRecipe::fp8_block);
}

}  // namespace
}  // namespace moebius
