#include "config/check/context_parallel_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(CheckContextParallel, HierarchicalNeedsSeveralGroupsOfSeveral) {
  const std::string needs =
      "= \"hierarchical\" splits the ranks of cp into equal groups of at least 2: parallel.cp must be at least 4 and "
      "not a prime number; got ";
  EXPECT_THAT(
      check_error({"parallel.cp=2", "train.seq_len=16", "parallel.cp_comm=hierarchical", "parallel.cp_inner=2"}, 2),
      HasSubstr("parallel.cp_comm " + needs +
                "2; choose \"allgather\", \"ring\" or \"alltoall\", or another parallel.cp [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=3", "train.seq_len=12", "parallel.cp_comm=hierarchical"}, 3),
              HasSubstr(needs + "3;"));
  EXPECT_THAT(
      check_error(
          {"parallel.cp=2", "train.seq_len=16", "model.sliding_window=4", "parallel.cp_comm_window=hierarchical"}, 2),
      HasSubstr("parallel.cp_comm_window " + needs + "2;"));
}

}  // namespace
}  // namespace moebius
