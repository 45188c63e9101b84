#include "io/flat_json.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace moebius {
namespace {

using nlohmann::json;

TEST(FlatJson, EqualsTheGeneralParser) {
  for (const char* text :
       {"{}", " { } ", R"({"text": "In the beginning"})", "\t{\"a\"\n:\r1 ,\"b\":-20,\"c\":0,\"d\":123456789012345678}",
        R"({"a": true, "b": false, "c": null, "": ""})", R"({"a": "\" \\ \/ \b\f\n\r\t"})",
        R"({"a": "\u0000\u00e9\u4e2d\ud83d\udc4d\uffff"})", "{\"a\": \"\xC3\xA9\xF0\x9F\x91\x8D\x7f\"}"}) {
    const auto got = parse_flat_object(text);
    ASSERT_TRUE(got.has_value()) << text;
    EXPECT_EQ(*got, json::parse(text)) << text;
    EXPECT_EQ(got->dump(), json::parse(text).dump()) << text;
  }
}

TEST(FlatJson, LeavesTheRestToTheGeneralParser) {
  for (const char* text : {"",
                           " ",
                           "[]",
                           "\"a\"",
                           "1",
                           "{",
                           "{\"a\"",
                           "{\"a\":",
                           "{\"a\":1",
                           "{\"a\":1,",
                           "{\"a\":1,}",
                           "{,}",
                           "{}{}",
                           "{}x",
                           "{\"a\" 1}",
                           "{a:1}",
                           "{\"a\":{}}",
                           "{\"a\":[1]}",
                           "{\"a\":1.5}",
                           "{\"a\":1e3}",
                           "{\"a\":1E3}",
                           "{\"a\":01}",
                           "{\"a\":-}",
                           "{\"a\":-01}",
                           "{\"a\":-0}",
                           "{\"a\":+1}",
                           "{\"a\":1234567890123456789}",
                           "{\"a\":tru}",
                           "{\"a\":nul",
                           "{\"a\":\"x}",
                           "{\"a\":\"x\ny\"}",
                           "{\"a\":\"\\x\"}",
                           "{\"a\":\"\\",
                           "{\"a\":\"\\u12\"}",
                           "{\"a\":\"\\u12g4\"}",
                           "{\"a\":\"\\u-123\"}",
                           "{\"a\":\"\\ud800\"}",
                           "{\"a\":\"\\ud800\\u0041\"}",
                           "{\"a\":\"\\udc00\"}",
                           "{\"a\":1,\"a\":2}",
                           "{\"a\":\"\xff\"}",
                           "\xEF\xBB\xBF{}",
                           "{\"a\":NaN}"})
    EXPECT_FALSE(parse_flat_object(text).has_value()) << text;
}

// The general parser accepts everything that this one accepts, with the same value.
TEST(FlatJson, AgreesOnDamagedText) {
  const std::string good = R"({"text": "a\n\"b\" \u00e9\ud83d\udc4d", "n": -12, "id": 7, "ok": true, "no": null})";
  const std::string bytes = "\"\\{}:,[]0123456789-.eEuntrdDaf \n\xC3";
  std::mt19937 random(1);
  int taken = 0;
  for (int i = 0; i < 200000; ++i) {
    std::string text = good;
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
      const size_t at = random() % text.size();
      if (random() % 3 == 0) {
        text.erase(at, 1 + random() % 3);
      } else {
        text[at] = bytes[random() % bytes.size()];
      }
    }
    const auto got = parse_flat_object(text);
    if (!got) continue;
    ++taken;
    const json want = json::parse(text, nullptr, /*allow_exceptions=*/false);
    ASSERT_FALSE(want.is_discarded()) << text;
    ASSERT_EQ(got->dump(), want.dump()) << text;
  }
  EXPECT_GT(taken, 10000);
}

}  // namespace
}  // namespace moebius
