#include "config/check/qk_clip_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(CheckQkClip, RefusesWhereHeadsCannotBeClipped) {
  const auto error = [](std::vector<std::string> set) {
    set.push_back("optimizer.qk_clip=100");
    return check_error(set, 1);
  };
  EXPECT_THAT(error({"model.qk_norm=true"}), HasSubstr("the norms of this model's queries and keys undo that"));
  EXPECT_THAT(error({"model.qk_norm=false", "model.clip_qkv=8"}),
              HasSubstr("which this model clamps (model.clip_qkv)"));
  EXPECT_THAT(error({"model.qk_norm=false", "lora.rank=4", "lora.targets=[\"q_proj\"]"}),
              HasSubstr("scales weights that lora.rank above 0 freezes"));
  EXPECT_NO_THROW(parse({"optimizer.qk_clip=100", "model.qk_norm=false"}).check(1));
}

}  // namespace
}  // namespace moebius
