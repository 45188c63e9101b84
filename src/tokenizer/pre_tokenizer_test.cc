#include "tokenizer/pre_tokenizer.h"

#include "io/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;

class Words : public WordSink {
 public:
  void word(std::string_view word) override { words.emplace_back(word); }
  std::vector<std::string> words;
};

std::vector<std::string> split(const std::string& json, std::string_view text, bool is_first = true) {
  const nlohmann::json parsed = nlohmann::json::parse(json);
  MatchScratch scratch;
  Words words;
  PreTokenizer::read(JsonField(parsed, "test")).split(text, is_first, scratch, &words);
  return words.words;
}

std::vector<std::string> split_digits(const std::string& behavior, bool invert = false) {
  return split(R"({"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": ")" + behavior + R"(", "invert": )" +
                   (invert ? "true" : "false") + "}",
               "12ab3c");
}

TEST(PreTokenizer, EachBehaviorOfSplit) {
  EXPECT_THAT(split_digits("Removed"), ElementsAre("ab", "c"));
  EXPECT_THAT(split_digits("Isolated"), ElementsAre("1", "2", "ab", "3", "c"));
  EXPECT_THAT(split_digits("MergedWithPrevious"), ElementsAre("1", "2", "ab3", "c"));
  EXPECT_THAT(split_digits("MergedWithNext"), ElementsAre("1", "2ab", "3c"));
  EXPECT_THAT(split_digits("Contiguous"), ElementsAre("12", "ab", "3", "c"));
  EXPECT_THAT(split_digits("Removed", true), ElementsAre("1", "2", "3"));
}

TEST(PreTokenizer, ClassesOfCharacters) {
  EXPECT_THAT(split(R"({"type": "Digits", "individual_digits": false})", "a12\xC2\xBD."),
              ElementsAre("a", "12\xC2\xBD", "."));
  EXPECT_THAT(split(R"({"type": "Digits", "individual_digits": true})", "a12"), ElementsAre("a", "1", "2"));
  EXPECT_THAT(split(R"({"type": "Punctuation"})", "a+b\xC2\xAB\xE2\x82\xAC"),
              ElementsAre("a", "+", "b", "\xC2\xAB", "\xE2\x82\xAC"));
  EXPECT_THAT(split(R"({"type": "Whitespace"})", "a_b, \xCC\x81!!"), ElementsAre("a_b", ",", "\xCC\x81", "!!"));
  EXPECT_THAT(split(R"({"type": "WhitespaceSplit"})",
                    " a,\xE3\x80\x80"
                    "b "),
              ElementsAre("a,", "b"));
}

TEST(PreTokenizer, MetaspaceIsPrependedByItsScheme) {
  const auto words = [](const char* scheme, std::string_view text, bool is_first = true) {
    return split(fmt::format(R"({{"type": "Metaspace", "replacement": "_", {}}})", scheme), text, is_first);
  };
  EXPECT_THAT(words(R"("prepend_scheme": "always")", "a  b", false), ElementsAre("_a", "_", "_b"));
  EXPECT_THAT(words(R"("prepend_scheme": "always")", " a"), ElementsAre("_a"));
  EXPECT_THAT(words(R"("prepend_scheme": "first")", "a b"), ElementsAre("_a", "_b"));
  EXPECT_THAT(words(R"("prepend_scheme": "first")", "a b", false), ElementsAre("a", "_b"));
  EXPECT_THAT(words(R"("prepend_scheme": "never", "split": false)", "a b"), ElementsAre("a_b"));
  EXPECT_THAT(words(R"("add_prefix_space": false)", "a"), ElementsAre("a"));
}

TEST(PreTokenizer, ByteLevelAfterASequence) {
  EXPECT_THAT(split(R"({"type": "ByteLevel"})", "it's  a"), ElementsAre(" it", "'s", " ", " a"));
  EXPECT_THAT(split(R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})", "it's a"),
              ElementsAre("it's a"));
  EXPECT_THAT(
      split(R"({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]})", "a b"),
      ElementsAre(" a", " b"));
}

}  // namespace
}  // namespace moebius
