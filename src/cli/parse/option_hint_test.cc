#include "cli/parse/option_hint.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

using Sets = UnknownOption::Sets;

std::string hint(const std::string& option, const std::string& next = "", Sets sets = Sets::recipe) {
  return option_hint({.option = option, .next = next, .options = {"--ranks", "--timeout", "--set"}, .sets = sets});
}

TEST(OptionHint, LastPartOfAKeySuggestsSet) {
  const std::string with = "; a key of the recipe is set with --set ";
  EXPECT_EQ(hint("--steps", "5"), with + "train.steps=5");
  EXPECT_EQ(hint("--steps=5", "recipe.toml"), with + "train.steps=5");
  EXPECT_EQ(hint("--train.steps", "5"), with + "train.steps=5");
  EXPECT_EQ(hint("--micro-batch", "2"), with + "train.micro_batch=2");
  EXPECT_EQ(hint("--steps", "recipe.toml"), with + "train.steps=VALUE");
  EXPECT_EQ(hint("--steps"), with + "train.steps=VALUE");
  EXPECT_EQ(hint("--fsdp", "recipe.toml"), with + "parallel.fsdp=true");
  EXPECT_EQ(hint("--fsdp", "false"), with + "parallel.fsdp=false");
  EXPECT_EQ(hint("--targets", "[\"*\"]"), with + "lora.targets='[\"*\"]'");
  EXPECT_EQ(hint("--dir", "a'b; c"), with + "run.dir=VALUE");
  EXPECT_EQ(hint("--init-from", "some"), with + "model.init_from=some or --set lora.init_from=some");
}

TEST(OptionHint, SuggestsOnlyKeysOfTheCommand) {
  EXPECT_EQ(hint("--steps", "5", Sets::layout), "");
  EXPECT_EQ(hint("--ep", "2", Sets::layout), "; a key of the recipe is set with --set parallel.ep=2");
  EXPECT_EQ(hint("--steps", "5", Sets::none), "");
}

TEST(OptionHint, TypoSuggestsTheNearestOption) {
  EXPECT_EQ(hint("--ranges", "2"), "; did you mean --ranks?");
  EXPECT_EQ(hint("--rank", "2"), "; did you mean --ranks or --set lora.rank=2?");
  EXPECT_EQ(hint("--time-out=2", "", Sets::none), "; did you mean --timeout?");
}

TEST(OptionHint, OptionOfOtherSoftwareSuggestsTheKey) {
  EXPECT_EQ(hint("--learning-rate", "1"),
            "; here that is optimizer.lr; --set SECTION.KEY=VALUE sets a key of the recipe");
  EXPECT_EQ(hint("--nonsense", "1"), "");
  EXPECT_EQ(hint("5"), "");
}

}  // namespace
}  // namespace moebius
