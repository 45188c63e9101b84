#include "config/check/hopper_notes.h"

#include <gmock/gmock.h>

namespace moebius {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

RunSpec run_with(PrecisionRecipe recipe, bool fuse_grad, DeviceKind device) {
  RunSpec run;
  run.device = device;
  run.precision.recipe = recipe;
  run.optimizer.fuse_grad = fuse_grad;
  return run;
}

TEST(HopperNotes, NameSettingsThatRunOnOtherGpus) {
  const std::string ends =
      " needs the kernels of a GPU of compute capability 9.0; on another one the run ends before its first step, and ";
  EXPECT_THAT(hopper_notes(run_with(PrecisionRecipe::fp8_block, true, DeviceKind::cuda)),
              ElementsAre("precision.recipe = \"fp8_block\"" + ends +
                              "precision.recipe = \"fp8_tensor\" (emulated) or \"none\" runs there",
                          "optimizer.fuse_grad = true" + ends + "optimizer.fuse_grad = false runs there"));
  EXPECT_THAT(hopper_notes(run_with(PrecisionRecipe::mxfp8, false, DeviceKind::cuda)), IsEmpty());
  EXPECT_THAT(hopper_notes(run_with(PrecisionRecipe::fp8_block, true, DeviceKind::cpu)), IsEmpty());
}

}  // namespace
}  // namespace moebius
