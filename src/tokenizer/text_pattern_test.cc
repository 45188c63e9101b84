#include "tokenizer/text_pattern.h"

#include "io/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;

std::vector<std::string> matches(const TextPattern& pattern, std::string_view text) {
  MatchScratch scratch;
  std::vector<std::string> found;
  pattern.for_each_span(text, scratch, [&](size_t begin, size_t end, bool is_match) {
    if (is_match) found.emplace_back(text.substr(begin, end - begin));
  });
  return found;
}

std::vector<std::string> matches(const char* regex, std::string_view text) {
  return matches(TextPattern::regex(regex, "test"), text);
}

TEST(TextPattern, LiteralsAndExpressions) {
  EXPECT_THAT(matches(TextPattern::literal("a.b"), "a.baxba.b"), ElementsAre("a.b", "a.b"));
  EXPECT_THAT(matches(TextPattern::literal(""), "ab"), ElementsAre());
  EXPECT_THAT(matches("a.b", "a.baxb"), ElementsAre("a.b", "axb"));
  EXPECT_THAT(matches("x*", "axxb"), ElementsAre("xx"));  // empty matches do not split
  EXPECT_THAT(matches("^a", "a\na"), ElementsAre("a", "a"));
}

TEST(TextPattern, ClassesMeanWhatOnigurumaMeans) {
  EXPECT_THAT(matches(R"(\s+)",
                      "a\xE1\xA0\x8E"
                      "b\xC2\x85"
                      "c"),
              ElementsAre("\xC2\x85"));  // U+180E is not white space
  EXPECT_THAT(matches(R"([^\s]+)",
                      "a\xC2\xA0"
                      "b"),
              ElementsAre("a", "b"));
  EXPECT_THAT(matches(R"(\S+)", "a\xE1\xA0\x8E \xC2\xA0"), ElementsAre("a\xE1\xA0\x8E"));
  EXPECT_THAT(matches(R"(\d)", "1\xC2\xB2\xD9\xA3"), ElementsAre("1", "\xD9\xA3"));
  EXPECT_THAT(matches(R"(\w+)", "a1_\xC2\xB2-"), ElementsAre("a1_\xC2\xB2"));
  EXPECT_THAT(matches("[\\u4e00-\\u9fa5]+",
                      "a\xE4\xBD\xA0\xE5\xA5\xBD"
                      "b"),
              ElementsAre("\xE4\xBD\xA0\xE5\xA5\xBD"));
  EXPECT_THAT(matches(R"(\p{L}+|\x{31}+)", "ab11"), ElementsAre("ab", "11"));
  EXPECT_THAT(matches("(?i:'s)", "'s'S'\xC5\xBF"), ElementsAre("'s", "'S", "'\xC5\xBF"));
}

TEST(TextPattern, AScriptExcludesCharactersSharedWithOthers) {
  const char* text = "\xE4\xBD\xA0\xE3\x80\x81";  // an ideograph and the ideographic comma
  EXPECT_THAT(matches(R"(\p{Han}+)", text), ElementsAre("\xE4\xBD\xA0"));
  EXPECT_THAT(matches(R"([\P{Han}]+)", text), ElementsAre("\xE3\x80\x81"));
  EXPECT_THAT(matches(R"(\p{^Han}+)", text), ElementsAre("\xE3\x80\x81"));
}

// Characters of Unicode 15 and 16, and one that no version has.
TEST(TextPattern, ClassesIncludeCharactersOfUnicode15And16) {
  EXPECT_THAT(matches(R"(\p{L}+)", "a\xF0\xB1\x8D\x90'"), ElementsAre("a\xF0\xB1\x8D\x90"));  // U+31350
  EXPECT_THAT(matches(R"(\p{Han}+)", "a\xF0\xB1\x8D\x90'"), ElementsAre("\xF0\xB1\x8D\x90"));
  EXPECT_THAT(matches(R"(\p{Lu}+)", "a\xEA\x9F\x8B'"), ElementsAre("\xEA\x9F\x8B"));     // U+A7CB
  EXPECT_THAT(matches(R"([^\p{L}]+)", "a\xEF\xBF\xBF'"), ElementsAre("\xEF\xBF\xBF'"));  // never assigned
}

TEST(TextPattern, ExpressionsThatDialectsReadDifferentlyAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {R"(\h)", "got \\h at byte 0 of \"\\h\""},
      {R"(a\b)", "got \\b at byte 1"},
      {R"(\pL)", "got \\p without braces"},
      {R"(\p{L)", "got braces without an end"},
      {R"(\u12)", "got \\u without four hexadecimal digits"},
      {R"([\W])", "got \\W in a class"},
      {"[a[b]]", "got a class within a class at byte 2"},
      {"[a&&b]", "got an intersection of classes"},
      {"[]a]", "got an empty class"},
      {"a{1,2}+", "got a + after {}"},
      {"(?m:a)", "got the group (?m:"},
      {"(*UTF)", "got a verb"},
      {"a\\", "got a backslash at the end"},
  };
  for (const auto& [regex, message] : cases) {
    SCOPED_TRACE(regex);
    expect_error(ErrorKind::input, "who: expected a supported regular expression; got ",
                 [&, r = regex] { pcre_of_onig(r, "who"); });
    expect_error(ErrorKind::input, message, [&, r = regex] { TextPattern::regex(r, "who"); });
  }
  expect_error(ErrorKind::input, "who: expected a regular expression; got \"a)\"",
               [] { TextPattern::regex("a)", "who"); });
}

TEST(TextPattern, EndlessBacktrackingIsAnError) {
  expect_error(ErrorKind::input, "to match in bounded time; got: match limit exceeded",
               [] { matches("(a+)+(b|d)", std::string(60, 'a') + "c"); });
}

}  // namespace
}  // namespace moebius
