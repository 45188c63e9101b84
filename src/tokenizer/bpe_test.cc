#include "tokenizer/bpe.h"

#include <algorithm>
#include <random>

#include "io/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;

std::vector<int32_t> encode(const Bpe& bpe, std::string_view word, BpeScratch* scratch) {
  std::vector<int32_t> ids;
  bpe.encode(word, scratch, &ids);
  return ids;
}

std::vector<int32_t> encode(const nlohmann::json& model, std::string_view word) {
  BpeScratch scratch;
  return encode(Bpe::read(JsonField(model, "test"), false), word, &scratch);
}

// Defines the result: while a pair is listed, the pair listed first becomes one symbol, the leftmost of
// equal pairs.
std::vector<std::string> merge_slowly(std::vector<std::string> symbols,
                                      const std::vector<std::vector<std::string>>& merges) {
  for (size_t rank = 0; rank < merges.size();) {
    size_t at = 0;
    while (at + 1 < symbols.size() && (symbols[at] != merges[rank][0] || symbols[at + 1] != merges[rank][1])) ++at;
    if (at + 1 >= symbols.size()) {
      ++rank;
      continue;
    }
    symbols[at] += symbols[at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    rank = 0;
  }
  return symbols;
}

TEST(Bpe, EqualsItsDefinition) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<std::string> tokens{"a", "b", "c"};
    std::vector<std::vector<std::string>> merges;
    while (tokens.size() < 15) {
      const std::string left = tokens[random() % tokens.size()], right = tokens[random() % tokens.size()];
      if (std::ranges::count(tokens, left + right) > 0) continue;
      merges.push_back({left, right});
      tokens.push_back(left + right);
    }
    nlohmann::json model{{"type", "BPE"}, {"merges", merges}};
    for (size_t id = 0; id < tokens.size(); ++id) model["vocab"][tokens[id]] = id;
    const Bpe bpe = Bpe::read(JsonField(model, "test"), false);
    BpeScratch scratch;
    for (int i = 0; i < 20; ++i) {
      std::vector<std::string> symbols(random() % 40);
      for (std::string& symbol : symbols) symbol = tokens[random() % 3];
      std::string word, got;
      for (const std::string& symbol : symbols) word += symbol;
      std::vector<std::string> pieces;
      for (const int32_t id : encode(bpe, word, &scratch)) pieces.push_back(tokens[static_cast<size_t>(id)]);
      EXPECT_EQ(pieces, merge_slowly(symbols, merges)) << word;
      EXPECT_EQ(encode(bpe, word, &scratch), encode(bpe, word, &scratch)) << word;  // the second comes from the cache
    }
  }
}

TEST(Bpe, UnknownCharacters) {
  nlohmann::json model{{"vocab", {{"<unk>", 0}, {"a", 1}, {"<0xC3>", 2}, {"<0xA9>", 3}}},
                       {"merges", nlohmann::json::array()}};
  EXPECT_THAT(encode(model, "axya"), ElementsAre(1, 1));  // no token represents x and y
  model["unk_token"] = "<unk>";
  EXPECT_THAT(encode(model, "axya"), ElementsAre(1, 0, 0, 1));
  model["fuse_unk"] = true;
  EXPECT_THAT(encode(model, "axya"), ElementsAre(1, 0, 1));
  EXPECT_THAT(encode(model, "a\xC3\xA9"), ElementsAre(1, 0));
  model["byte_fallback"] = true;
  EXPECT_THAT(encode(model, "a\xC3\xA9\xC3\xAA"), ElementsAre(1, 2, 3, 0));  // no token for its last byte
  EXPECT_THAT(encode(model, "x\xC3\xA9"), ElementsAre(2, 3, 0));             // the unknown character is held back
}

TEST(Bpe, AWholeWordOfTheVocabularyNeedsNoMergesWhereTheyAreIgnored) {
  nlohmann::json model{{"vocab", {{"a", 0}, {"b", 1}, {"c", 2}, {"abc", 3}, {"ab", 4}}}, {"merges", {"a b"}}};
  EXPECT_THAT(encode(model, "abc"), ElementsAre(4, 2));
  model["ignore_merges"] = true;
  EXPECT_THAT(encode(model, "abc"), ElementsAre(3));
}

// With "a_" in the list, a marker may merge with the character before it, and text must not
// be split there.
TEST(Bpe, SplitsAtMarkersOnlyIfNoMergeCrossesThem) {
  const std::string mark = "\xE2\x96\x81";
  nlohmann::json model{{"vocab", {{"a", 0}, {mark, 1}, {mark + "a", 2}, {"a" + mark, 3}}}, {"merges", {mark + " a"}}};
  EXPECT_THAT(encode(model, "a" + mark + mark + "a" + mark + "a"), ElementsAre(0, 1, 2, 2));
  model["merges"] = {"a " + mark, mark + " a"};
  EXPECT_THAT(encode(model, "a" + mark + mark + "a" + mark + "a"), ElementsAre(3, 1, 3, 0));
}

}  // namespace
}  // namespace moebius
