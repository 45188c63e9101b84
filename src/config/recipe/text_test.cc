#include "config/recipe/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "config/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::HasSubstr;

TEST(ReadRecipe, GivesEachKeyItsValueAndLine) {
  const auto entries = read_recipe("[b]\nx = 1\n\n[a]\ny = [1.5, {z = true}]\n\"q w\" = \"s\"\n", "r.toml");
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].key, "a.q w");
  EXPECT_EQ(entries[0].value, "s");
  EXPECT_EQ(entries[1].key, "a.y");
  EXPECT_EQ(entries[1].value, json::parse("[1.5, {\"z\": true}]"));
  EXPECT_EQ(entries[1].where, "r.toml:5");
  EXPECT_EQ(entries[2].key, "b.x");
  EXPECT_EQ(entries[2].where, "r.toml:2");
}

TEST(ReadRecipe, KeysOutsideOfSectionsAndEmptySectionsKeepTheirName) {
  const auto entries = read_recipe("steps = 3\n[run]\n", "r.toml");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].key, "run");
  EXPECT_EQ(entries[0].value, json::object());
  EXPECT_EQ(entries[1].key, "steps");
}

TEST(ReadRecipe, OtherAlphabetsInStringsAndComments) {
  const std::string e = "\xc3\xa9";
  const auto entries = read_recipe(
      "\xef\xbb\xbf"
      "[a] # " +
          e + "\nw = \"\\\"" + e + "\"\nx = '\\" + e + "'\n" + "y = \"\"\"\n\\\"\"\"" + e + "\"\"\"\"\nz = '''" + e +
          "\n'''",
      "r.toml");
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].value, "\"" + e);
  EXPECT_EQ(entries[1].value, "\\" + e);
  EXPECT_EQ(entries[2].value, "\"\"\"" + e + "\"");
  EXPECT_EQ(entries[3].value, e + "\n");
  EXPECT_EQ(read_override("a.b=" + e).value, e);
}

TEST(ReadRecipe, RefusesInvalidTomlAndDates) {
  const auto text = [](const std::string& toml) {
    return error_text(ErrorKind::usage, [&] { read_recipe(toml, "r.toml"); });
  };
  EXPECT_THAT(text("[# x\n"), HasSubstr("r.toml:1:2: not TOML: "));
  EXPECT_THAT(text("[run]\ndir = x\n"), HasSubstr("r.toml:2:7: not TOML: "));
  EXPECT_THAT(text("[run]\na = 1\na = 2\n"), HasSubstr("r.toml:3:5: not TOML: "));
  EXPECT_THAT(text("[run]\nday = 2020-01-02\n"),
              HasSubstr("r.toml:2: no key holds a date or time; write a string in quotes"));
  EXPECT_THAT(text("[run]\ndir\xc8\xa4 = 1"),
              HasSubstr("r.toml:2: expected ASCII outside of strings and comments; got another character; quote it"));
  EXPECT_THAT(text("a = 'x\\' \xc3\xa9"),
              HasSubstr("r.toml:1: expected ASCII outside of strings and comments; got another character"));
  EXPECT_THAT(text("a = \"\xff\""), HasSubstr("r.toml:1:5: not TOML"));
  EXPECT_THAT(text("[run]\nx = " + std::string(20, '[') + std::string(20, ']')),
              HasSubstr("r.toml:2: values nest deeper than 16; remove brackets"));
}

TEST(ReadOverride, AValueIsTomlOrElseAString) {
  const auto value = [](const std::string& text) { return read_override("a.b=" + text).value; };
  EXPECT_EQ(value("3"), 3);
  EXPECT_EQ(value("3e-4"), 3e-4);
  EXPECT_EQ(value("false"), false);
  EXPECT_EQ(value("\"x y\""), "x y");
  EXPECT_EQ(value("[\"x\", \"y\"]"), (json{"x", "y"}));
  EXPECT_EQ(value("{prefix = \"p\", weight = 2}"), (json{{"prefix", "p"}, {"weight", 2}}));
  EXPECT_EQ(value("word"), "word");
  EXPECT_EQ(value("/a/b c=d"), "/a/b c=d");
  EXPECT_EQ(value("2020-01-02"), "2020-01-02");
  EXPECT_EQ(value(""), "");
  EXPECT_EQ(value("1\ny = 2"), "1\ny = 2");  // no way to smuggle in another key
  EXPECT_EQ(read_override("a.b=c").key, "a.b");
  EXPECT_EQ(read_override("a.b=c").where, "--set");
}

TEST(ReadOverride, InvalidOverridesAreRefused) {
  const auto text = [](const std::string& set) { return error_text(ErrorKind::usage, [&] { read_override(set); }); };
  EXPECT_THAT(text("a.b"), HasSubstr("--set a.b: expected SECTION.KEY=VALUE, as in --set train.steps=100"));
  EXPECT_THAT(text("=3"), HasSubstr("--set =3: expected SECTION.KEY=VALUE"));
  EXPECT_THAT(text("a.b=[x, y]"), HasSubstr("--set a.b=[x, y]: the value is not TOML; quote strings inside lists"));
  EXPECT_THAT(text("a.b=\xff"), HasSubstr("the value is not TOML"));
}

TEST(TomlText, RoundTrips) {
  EXPECT_EQ(toml_text(1.0), "1.0");
  EXPECT_EQ(toml_text(1e-5), "1e-05");
  EXPECT_EQ(toml_text(0.1), "0.1");
  EXPECT_EQ(toml_text("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000A\"");
  EXPECT_EQ(toml_text(json{{"a b", {1, 2}}, {"c", true}}), "{\"a b\" = [1, 2], c = true}");
  std::mt19937_64 random(17);
  for (int i = 0; i < 1000; ++i) {
    const double value = std::bit_cast<double>(random());
    if (!std::isfinite(value)) continue;
    EXPECT_EQ(read_override("a.b=" + toml_text(value)).value, json(value)) << toml_text(value);
  }
}

}  // namespace
}  // namespace moebius
