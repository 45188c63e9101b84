// Tokenizers against Hugging Face's library: every style of tests/golden/data/tokenizers, written by
// tools/tokenizer_golden.py.
#include "io/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "io/json_text.h"

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

class TokenizerGolden : public testing::TestWithParam<std::string> {};

TEST_P(TokenizerGolden, SameIdsAndSameText) {
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

INSTANTIATE_TEST_SUITE_P(Styles, TokenizerGolden, testing::ValuesIn(styles()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace moebius
