#include "config/recipe/reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(RecipeReference, HasASentenceForEachKeyAndNoOther) {
  std::set<std::string> described;
  for (const KeyText& text : key_texts()) {
    EXPECT_TRUE(described.insert(std::string(text.name)).second) << text.name << " stands twice";
    EXPECT_TRUE(text.what.ends_with('.')) << text.name << " is no sentence";
  }
  const std::vector<std::string> keys = recipe_keys();
  EXPECT_EQ(described, std::set<std::string>(keys.begin(), keys.end()));
}

TEST(RecipeReference, SaysValuesDefaultsAndWhatMayChange) {
  const std::string text = recipe_reference();
  EXPECT_THAT(text, HasSubstr("## [optimizer]\n"));
  EXPECT_THAT(text,
              testing::ContainsRegex("\n. beta2 . [^|]+ . a number of at least 0 and below 1[^|]+ . `0.95` .  .\n"));
  EXPECT_THAT(text, testing::ContainsRegex("\n. steps . [^|]+ . a whole number from 1 to [^|]+ . required . yes .\n"));
  EXPECT_THAT(text, HasSubstr("`Et*3\\|(tt\\|)*29m\\|L`")) << "a bar inside a cell of a table";
}

// `moebius config --keys > docs/reference/recipe.md` writes it anew.
TEST(RecipeReference, IsWhatTheDocsSay) {
  std::ifstream file(MOEBIUS_SOURCE_DIR "/docs/reference/recipe.md");
  const std::string written{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(written == recipe_reference())
      << "docs/reference/recipe.md is stale: moebius config --keys > docs/reference/recipe.md";
}

}  // namespace
}  // namespace moebius
