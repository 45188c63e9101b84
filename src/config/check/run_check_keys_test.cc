#include "config/check/run_check_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(NearestDivisor, MayBeOnBothSides) {
  EXPECT_EQ(nearest_divisor(4, 8), 4);
  EXPECT_EQ(nearest_divisor(4, 3), 2) << "the smaller of two";
  EXPECT_EQ(nearest_divisor(64, 30), 32);
  EXPECT_EQ(nearest_divisor(7, 5), 7);
  EXPECT_EQ(nearest_divisor(7, 3), 1);
  EXPECT_EQ(nearest_divisor(12, 6), 6);
}

TEST(Check, NamesTheNearestDegreeForTheRanks) {
  EXPECT_THAT(check_error({"parallel.tp=8", "model.num_attention_heads=8", "model.num_key_value_heads=4"}, 8),
              HasSubstr("parallel.tp must divide model.num_key_value_heads = 4; got 8; the nearest for 8 ranks is 4"));
  EXPECT_THAT(check_error({"parallel.tp=3"}, 12),
              HasSubstr("model.num_attention_heads = 2; got 3; the nearest for 12 ranks is 2"));
  EXPECT_THAT(check_error({"parallel.ep=3", "train.global_batch=36"}, 12),
              HasSubstr("parallel.ep must divide model.num_experts = 4; got 3; the nearest for 12 ranks is 2"));
  EXPECT_THAT(check_error({"parallel.ep=6", "model.num_experts=16"}, 24),
              HasSubstr("parallel.ep must divide model.num_experts = 16; got 6; the nearest for 24 ranks is 4"));
}

TEST(Check, NamesTheNearestBatchOfVirtualStages) {
  EXPECT_THAT(check_error({"parallel.pp=2", "parallel.vpp=2", "model.num_hidden_layers=4", "train.global_batch=7"}, 2),
              HasSubstr("= 3 * 1 = 3; got 7; the nearest are 6 and 12 [--set]"))
      << "virtual stages take micro-batches in pairs";
}

}  // namespace
}  // namespace moebius
