#include "config/recipe/reference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(RecipeReference, HasASentenceForEachKeyAndNoOther) {
  std::set<std::string> described;
  for (const KeyText& text : key_texts()) {
    EXPECT_TRUE(described.insert(std::string(text.name)).second) << text.name << " is there twice";
    EXPECT_TRUE(text.what.ends_with('.')) << text.name << " is no sentence";
  }
  const std::vector<std::string> keys = recipe_keys();
  EXPECT_EQ(described, std::set<std::string>(keys.begin(), keys.end()));
}

TEST(RecipeReference, ListsValuesDefaultsAndWhatMayChange) {
  const std::string text = recipe_reference();
  EXPECT_THAT(text, HasSubstr("## [optimizer]\n"));
  EXPECT_THAT(text,
              testing::ContainsRegex("\n. beta2 . [^|]+ . a number of at least 0 and below 1[^|]+ . `0.95` .  .\n"));
  EXPECT_THAT(text, testing::ContainsRegex("\n. steps . [^|]+ . a whole number from 1 to [^|]+ . required . yes .\n"));
  EXPECT_THAT(text, HasSubstr("`Et*3\\|(tt\\|)*29m\\|L`")) << "a bar inside a cell of a table";
}

TEST(RecipeReference, IsAnObjectOfTheSameKeys) {
  const nlohmann::ordered_json keys = recipe_reference_json().at("keys");
  const std::set<std::string> types{"boolean", "integer", "number", "string", "array", "object"};
  std::map<std::string, nlohmann::ordered_json> by_name;
  for (const auto& key : keys) {
    by_name[key.at("key").get<std::string>()] = key;
    EXPECT_TRUE(types.contains(key.at("type").get<std::string>())) << key;
  }
  ASSERT_EQ(by_name.size(), keys.size());
  for (const std::string& name : recipe_keys()) EXPECT_TRUE(by_name.contains(name)) << name;
  const auto& beta2 = by_name.at("optimizer.beta2");
  EXPECT_EQ(beta2.at("type"), "number");
  EXPECT_EQ(beta2.at("default"), 0.95);
  EXPECT_THAT(beta2.at("values").get<std::string>(), HasSubstr("a number of at least 0 and below 1"));
  EXPECT_FALSE(beta2.at("may_change_on_resume").get<bool>());
  EXPECT_EQ(by_name.at("optimizer.lr").at("type"), "number");
  EXPECT_EQ(by_name.at("run.seed").at("type"), "integer");
  EXPECT_EQ(by_name.at("run.graph").at("default"), true);
  EXPECT_EQ(by_name.at("train.freeze").at("type"), "array");
  EXPECT_EQ(by_name.at("model.head_dim").at("default"), nullptr);
  EXPECT_EQ(by_name.at("model.head_dim").at("default_text"), "`hidden_size / num_attention_heads`");
  EXPECT_TRUE(by_name.at("train.steps").at("may_change_on_resume").get<bool>());
}

// `moebius config --keys > docs/reference/recipe.md` writes it again.
TEST(RecipeReference, EqualsTheDocs) {
  std::ifstream file(MOEBIUS_SOURCE_DIR "/docs/reference/recipe.md");
  const std::string written{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(written == recipe_reference())
      << "docs/reference/recipe.md is stale: moebius config --keys > docs/reference/recipe.md";
}

}  // namespace
}  // namespace moebius
