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
                "2; choose \"allgather\", \"ring\" or \"alltoall\", or parallel.cp = 4, which needs a multiple of tp * "
                "cp * pp = 4 ranks [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=3", "train.seq_len=12", "parallel.cp_comm=hierarchical"}, 3),
              HasSubstr(needs + "3; choose \"allgather\", \"ring\" or \"alltoall\", or parallel.cp = 6, which"));
  EXPECT_THAT(check_error({"parallel.cp=7", "train.seq_len=32", "parallel.cp_comm=hierarchical"}, 7),
              HasSubstr("or parallel.cp = 8, which needs a multiple of tp * cp * pp = 8 ranks [--set]"));
  EXPECT_THAT(
      check_error({"parallel.cp=3", "train.seq_len=12", "parallel.cp_comm=hierarchical", "model.num_key_value_heads=1"},
                  3),
      HasSubstr("\"alltoall\", since no parallel.cp has two levels with this length and these heads [--set]"));
  EXPECT_THAT(
      check_error(
          {"parallel.cp=2", "train.seq_len=16", "model.sliding_window=4", "parallel.cp_comm_window=hierarchical"}, 2),
      HasSubstr("parallel.cp_comm_window " + needs + "2;"));
}

// The sequence is too long for each cp, so another cp would not help.
TEST(CheckContextParallel, LengthBeyondThePositionsNamesNoOtherCp) {
  EXPECT_THAT(check_error({"parallel.cp=2", "train.seq_len=37"}, 2),
              HasSubstr("train.seq_len must be divisible by 2 * parallel.cp = 4; got 37; the nearest within "
                        "model.max_position_embeddings = 33 is 32 [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=24", "train.seq_len=37"}, 24),
              HasSubstr("got 37; choose a smaller parallel.cp and a length within the positions of the model [--set]"));
}

// The nearest cp is one into which the ranks can be grouped.
TEST(CheckContextParallel, TheNearestCpIsOneOfTheseRanks) {
  EXPECT_THAT(check_error({"parallel.cp=3", "train.seq_len=16"}, 12),
              HasSubstr("2 * parallel.cp = 6; got 16; the nearest are 12 and 18, or parallel.cp = 2 [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=3", "train.seq_len=16"}, 3),
              HasSubstr("got 16; the nearest are 12 and 18, or parallel.cp = 1 [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=3", "train.seq_len=16", "parallel.cp_comm=ring"}, 3),
              HasSubstr("are 12 and 18, or parallel.cp = 1 and remove parallel.cp_comm [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=3", "train.seq_len=16", "parallel.cp_comm=alltoall"}, 3),
              HasSubstr("or \"ring\", or parallel.cp = 1 and remove parallel.cp_comm [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=6", "train.seq_len=16"}, 24), HasSubstr("or parallel.cp = 4 [--set]"));
  EXPECT_THAT(check_error({"parallel.cp=6", "train.seq_len=16", "parallel.cp_comm=alltoall"}, 24),
              HasSubstr("\"allgather\" or \"ring\", or parallel.cp = 2 [--set]"));
}

TEST(CheckContextParallel, RowsThatTpDoesNotDivideNameTheNearestLengths) {
  EXPECT_THAT(check_error({"parallel.tp=2", "train.micro_batch=1", "train.seq_len=15"}, 2),
              HasSubstr("parallel.tp = 2 must divide the tokens of a micro-batch on a rank, train.micro_batch * "
                        "train.seq_len / parallel.cp = 1 * 15 / 1 = 15; the nearest train.seq_len are 14 and 16, or "
                        "choose another train.micro_batch or parallel.tp [--set]"));
  EXPECT_NO_THROW(parse({"parallel.tp=2", "train.micro_batch=2", "train.seq_len=15"}).check(2));
}

}  // namespace
}  // namespace moebius
