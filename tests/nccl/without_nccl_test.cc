// Tests of a build without NCCL.
#include <gtest/gtest.h>

#include "comm/gpu/nccl.h"

namespace moebius {
namespace {

TEST(WithoutNccl, TheReasonNamesTheHeader) {
  EXPECT_NE(NcclLinks::why_missing().find("nccl.h must be installed"), std::string::npos) << NcclLinks::why_missing();
  EXPECT_EQ(NcclLinks::version(), "");
}

}  // namespace
}  // namespace moebius
