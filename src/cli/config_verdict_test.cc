#include "cli/config_verdict.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(ConfigVerdict, SaysWhichRanksAPredictionHoldsFor) {
  const DeviceMemory memory{.plan_bytes = 58 << 20, .workspace_bytes = 130 << 20, .code_bytes = 6 << 20};
  EXPECT_EQ(sharing_text(memory, 1, 0), "");
  EXPECT_EQ(sharing_text(memory, 1, 1), "");
  for (const int64_t num_gpus : {0, 4, 8})
    EXPECT_EQ(sharing_text(memory, 4, num_gpus), ", for each rank that has a GPU of its own");
  EXPECT_EQ(sharing_text(memory, 4, 1),
            ", for each rank that has a GPU of its own; on this machine alone 4 ranks would share a GPU and take up to "
            "776.0 MiB of it together, beside their contexts, which are not predicted");
  EXPECT_NE(sharing_text(memory, 5, 3).find("alone 2 ranks would share a GPU and take up to 388.0 MiB"),
            std::string::npos);
}

}  // namespace
}  // namespace moebius
