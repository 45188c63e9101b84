#include "config/nearest.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsAndSubstitutions) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("flaw", "lawn"), 2);
  EXPECT_EQ(edit_distance("same", "same"), 0);
}

TEST(Nearest, PrefersFewEditsThenTheRightKeyInAnotherSection) {
  const std::vector<std::string> keys = {"run.dir", "train.steps", "optimizer.lr", "optimizer.min_lr"};
  EXPECT_EQ(nearest("train.step", keys), "train.steps");
  EXPECT_EQ(nearest("train.lr", keys), "optimizer.lr");
  EXPECT_EQ(nearest("optimiser.min_lr", keys), "optimizer.min_lr");
  EXPECT_EQ(nearest("rum.dir", keys), "run.dir");
}

TEST(Nearest, AWordThatIsNearNothingGetsNoHint) {
  const std::vector<std::string> keys = {"log.every", "train.micro_batch", "train.steps", "optimizer.schedule"};
  EXPECT_EQ(nearest_if_near("train.stpes", keys), "train.steps");
  EXPECT_EQ(nearest_if_near("optimizer.steps", keys), "train.steps");
  EXPECT_EQ(nearest_if_near("optimizer.step", keys), "") << "a slip, and of another section";
  EXPECT_EQ(nearest_if_near("trian.steps", keys), "train.steps");
  EXPECT_EQ(nearest_if_near("logs", keys), "log.every") << "a section";
  EXPECT_EQ(nearest_if_near("train.learning_rate", keys), "");
  EXPECT_EQ(nearest_if_near("train.patience", keys), "");
  EXPECT_EQ(nearest_if_near("precision.keep", {"checkpoint.keep", "precision.compute"}), "") << "a short word";
  EXPECT_EQ(nearest_if_near("lora.r", {"optimizer.lr", "moe.balance"}), "");
}

}  // namespace
}  // namespace moebius
