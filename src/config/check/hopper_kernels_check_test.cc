#include "config/check/hopper_kernels_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(CheckHopperKernels, RefusesASplitBatchOnPortableKernels) {
  std::vector<std::string> split{"parallel.ep=2", "parallel.dispatcher=direct", "parallel.expert_overlap=batch_split",
                                 "precision.compute=bf16", "run.kernels=portable"};
  EXPECT_NO_THROW(parse(split).check(2)) << "a CPU has no such kernels";
  split.push_back("run.device=cuda");
  EXPECT_THAT(check_error(split, 2),
              HasSubstr("parallel.expert_overlap = \"batch_split\" needs Hopper's kernels, which run.kernels = "
                        "\"portable\" leaves out; set run.kernels = \"auto\", or expert_overlap to \"layer\" or "
                        "\"none\" [--set]"));
  std::vector<std::string> own = split, f32 = split;
  own.push_back("run.kernels=auto");
  f32.push_back("precision.compute=f32");
  EXPECT_NO_THROW(parse(own).check(2));
  EXPECT_NO_THROW(parse(f32).check(2)) << "the kernels of f32 compute parts of the rows";
}

}  // namespace
}  // namespace moebius
