// Compares tokenizers with Hugging Face's library, for every style of tests/golden/data/tokenizers,
// written by tools/tokenizer_golden.py.
#include "tokenizer/tokenizer.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "io/json_text.h"
#include "io/unicode.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers";

std::vector<std::string> styles() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kData))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

class TokenizerStyle : public testing::TestWithParam<std::string> {};

TEST_P(TokenizerStyle, SameIdsAndSameText) {
  const auto texts = read_json(kData + "/texts.json").get<std::vector<std::string>>();
  const nlohmann::json expected = read_json(kData + "/" + GetParam() + "/expected.json");
  ASSERT_EQ(texts.size(), expected.at("ids").size());
  const auto tokenizer = open_tokenizer(kData + "/" + GetParam());
  for (size_t i = 0; i < texts.size(); ++i) {
    std::vector<int32_t> ids;
    tokenizer->encode(texts[i], &ids);
    EXPECT_EQ(ids, expected.at("ids")[i].get<std::vector<int32_t>>()) << "text " << i << ": " << texts[i];
    EXPECT_EQ(tokenizer->decode(ids), expected.at("decoded")[i].get<std::string>()) << "text " << i;
  }
}

constexpr char32_t kBlock = 4096, kLine = 64;  // characters of one hash, and of one text

// Returns the hash of tools/tokenizer_golden.py: FNV-1a, one id per step.
std::string hash_of_block(const Tokenizer& tokenizer, char32_t first, const nlohmann::json& context) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char32_t line = first; line < first + kBlock; line += kLine) {
    std::string text;
    for (char32_t c = line; c < line + kLine; ++c) {
      if (c >= 0xd800 && c < 0xe000) continue;
      text += context.at("before").get_ref<const std::string&>();
      append_utf8(c, &text);
      text += context.at("after").get_ref<const std::string&>();
    }
    std::vector<int32_t> ids;
    tokenizer.encode(text, &ids);
    for (const int32_t id : ids) hash = (hash ^ static_cast<uint64_t>(id)) * 0x100000001b3;
  }
  return fmt::format("{:016x}", hash);
}

// This includes characters that the installed PCRE2 or utf8proc do not know, or that they know and
// Hugging Face's tables do not.
TEST(TokenizerGolden, EveryCharacterIsSplitAsByHuggingFace) {
  const nlohmann::json styles = read_json(kData + "/characters.json");
  for (const auto& [style, context] : styles.items()) {
    const auto tokenizer = open_tokenizer(kData + "/" + style, {.add_special = false});
    const auto hashes = context.at("hashes").get<std::vector<std::string>>();
    ASSERT_EQ(hashes.size(), 0x110000 / kBlock);
    for (size_t i = 0; i < hashes.size(); ++i) {
      const auto first = static_cast<char32_t>(i * kBlock);
      EXPECT_EQ(hash_of_block(*tokenizer, first, context), hashes[i])
          << style << fmt::format(", characters from U+{:04X}", static_cast<uint32_t>(first));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, TokenizerStyle, testing::ValuesIn(styles()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace moebius
