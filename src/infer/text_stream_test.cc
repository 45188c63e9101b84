#include "infer/text_stream.h"

#include "io/testing.h"

namespace moebius {
namespace {

// Says what add() returns for each byte, and rest(), with | between them.
std::string pieces(const std::string& text, const std::vector<std::string>& stops) {
  const auto tokenizer = open_tokenizer("bytes");
  TextStream stream(*tokenizer, stops);
  std::string all;
  for (const char c : text) {
    all += stream.add(static_cast<uint8_t>(c)) + "|";
    if (stream.is_stopped()) return all + "stopped";
  }
  return all + stream.rest();
}

TEST(TextStream, HoldsBackPrefixesOfStopStrings) {
  EXPECT_EQ(pieces("abc", {}), "a|b|c|");
  EXPECT_EQ(pieces("a<end>b", {"<end>"}), "a||||||stopped");
  EXPECT_EQ(pieces("a<enx", {"<end>"}), "a||||<enx|");
  EXPECT_EQ(pieces("a<en", {"<end>"}), "a||||<en");
  EXPECT_EQ(pieces("aab", {"ab"}), "|a||stopped");
  EXPECT_EQ(pieces("xy", {"y", "xy"}), "||stopped");
}

// Each byte of a character is a token, which alone is no text.
TEST(TextStream, GivesWholeCharacters) {
  const auto tokenizer = open_tokenizer(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/qwen2",
                                        {.parse_special = true, .add_special = false});
  const std::string text = "ab \xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7 na\xC3\xAFve \xE4\xBD\xA0";
  std::vector<int32_t> ids;
  tokenizer->encode(text, &ids);
  TextStream stream(*tokenizer, {});
  std::string all;
  for (const int32_t id : ids) {
    const std::string piece = stream.add(id);
    EXPECT_EQ(piece.find("\xEF\xBF\xBD"), std::string::npos);
    all += piece;
  }
  EXPECT_EQ(all + stream.rest(), text);
  EXPECT_EQ(stream.text(), text);
}

TEST(TextStream, ABrokenCharacterAtTheEndIsShown) {
  const auto tokenizer = open_tokenizer(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/qwen2",
                                        {.parse_special = true, .add_special = false});
  std::vector<int32_t> ids;
  tokenizer->encode("\xF0\x9F\x91\xA9", &ids);
  ASSERT_GT(ids.size(), 1u);
  TextStream stream(*tokenizer, {});
  EXPECT_EQ(stream.add(ids[0]), "");
  EXPECT_EQ(stream.rest(), "\xEF\xBF\xBD");
}

TEST(TextStream, EmptyStopStringsAreRefused) {
  expect_error(ErrorKind::usage, "expected stop strings of at least one character",
               [] { TextStream(*open_tokenizer("bytes"), {""}); });
}

}  // namespace
}  // namespace moebius
