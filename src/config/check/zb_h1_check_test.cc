#include "config/check/zb_h1_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

const std::string kZbH1 = "parallel.schedule=zb_h1", kTwoStages = "parallel.layout=E t*2 | t L";

TEST(CheckZbH1, PassesWhatCanBeCombined) {
  EXPECT_NO_THROW(parse({kZbH1, "parallel.pp=2", kTwoStages}).check(2));
  EXPECT_NO_THROW(parse({kZbH1, "parallel.pp=2", kTwoStages, "parallel.ep=2"}).check(4));
  // One stage has nothing to delay.
  EXPECT_NO_THROW(parse({kZbH1, "precision.compute=bf16", "optimizer.grad=bf16"}).check(2));
}

TEST(CheckZbH1, ErrorsNameTheUnsupportedSetting) {
  EXPECT_THAT(
      check_error({kZbH1, "parallel.pp=2", "parallel.vpp=2", "parallel.layout=E t | t | t | L"}, 2),
      HasSubstr(
          "parallel.schedule = \"zb_h1\" needs one stage per rank (parallel.vpp = 1); got parallel.vpp = 2; set parallel.vpp = 1, "
          "or parallel.schedule = \"1f1b\" [--set]"));
  EXPECT_THAT(check_error({kZbH1, "parallel.pp=2", kTwoStages, "precision.compute=bf16", "optimizer.grad=bf16"}, 2),
              HasSubstr("needs sums of gradients in f32; got optimizer.grad = \"bf16\""));
  EXPECT_THAT(check_error({kZbH1, "parallel.pp=2", kTwoStages, "parallel.shard_gradients=true"}, 2),
              HasSubstr("needs whole gradients on each rank; got parallel.shard_gradients = true, with which"));
  EXPECT_THAT(check_error({kZbH1, "parallel.pp=2", kTwoStages, "parallel.fsdp=true"}, 2),
              HasSubstr("needs whole weights on each rank; got parallel.fsdp = true"));
  EXPECT_THAT(check_error({kZbH1, "parallel.pp=2", kTwoStages, "memory.offload=[\"weights\"]"}, 2),
              HasSubstr("needs whole weights on the device; got \"weights\" in memory.offload"));
}

}  // namespace
}  // namespace moebius
