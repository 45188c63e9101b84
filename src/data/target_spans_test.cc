#include "data/target_spans.h"

#include "data/token_data.h"
#include "io/testing.h"

namespace moebius {
namespace {

template <class T>
std::string raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

void refuse(const std::string& bytes, const std::string& text, int64_t num_tokens = 9) {
  expect_error(ErrorKind::input, text, [&] { parse_target_spans(bytes, num_tokens, "P.targets"); });
}

std::string spans_text(const std::vector<TokenSpan>& spans) { return target_spans_text(spans, 9); }

TEST(TargetSpans, RoundTrip) {
  const std::vector<TokenSpan> spans{{0, 2}, {3, 4}, {5, 9}};
  EXPECT_EQ(parse_target_spans(spans_text(spans), 9, "P"), spans);
  EXPECT_EQ(parse_target_spans(spans_text({}), 9, "P"), std::vector<TokenSpan>{});
}

TEST(TargetSpans, RefusesInvalidSpans) {
  const std::string good = spans_text({{0, 2}});
  refuse("", "P.targets: expected target spans of version 1; got 0 other bytes");
  refuse("X" + good.substr(1), "expected target spans of version 1");
  refuse(good.substr(0, 8) + raw<uint64_t>(2) + good.substr(16), "expected target spans of version 1");
  refuse(good, "expected the spans of 8 tokens, as the .bin has; got those of 9", 8);
  refuse(good + "x", "expected 32 + 16 spans bytes; got 49 bytes, 1 spans");
  refuse(good.substr(0, 40), "got 40 bytes, 1 spans");
  refuse(good.substr(0, 24) + raw<uint64_t>(uint64_t{1} << 60) + good.substr(32), "32 + 16 spans bytes; got 48");
  refuse(spans_text({{0, 10}}), "expected spans that rise within 9 tokens; got [0, 10) as span 0");
  refuse(spans_text({{3, 3}}), "got [3, 3) as span 0");
  refuse(spans_text({{-1, 3}}), "got [-1, 3) as span 0");
  refuse(spans_text({{0, 3}, {3, 4}}), "got [3, 4) as span 1");
  refuse(spans_text({{4, 6}, {1, 2}}), "got [1, 2) as span 1");
}

TEST(TargetSpans, BelongToADataset) {
  const TestDir dir;
  const std::vector<int32_t> ids{1, 2, 3};
  const auto write = [&](bool prompts) {
    TokenDatasetWriter writer(dir.path("p"), TokenType::u16);
    for (int i = 0; i < 2; ++i) {
      writer.add_tokens(ids, !prompts);
      writer.add_tokens(std::span(ids).first(2));
      writer.end_document();
    }
    writer.add_tokens(ids);
    writer.end_document();
    writer.close();
    return TokenDataset::open(dir.path("p"));
  };
  const TokenDataset with = write(true);
  EXPECT_TRUE(with.has_targets());
  EXPECT_THAT(with.target_spans(), testing::ElementsAre(TokenSpan{3, 5}, TokenSpan{8, 13}));
  const TokenDataset without = write(false);
  EXPECT_FALSE(without.has_targets());
  EXPECT_NE(with.fingerprint(), without.fingerprint());
  EXPECT_EQ(dir.num_files(), 2) << "the spans of the dataset before are gone";
  write_file_atomic(dir.path("p.targets"), target_spans_text({{0, 1}}, 12));
  expect_error(ErrorKind::input, "p.targets: expected the spans of 13 tokens",
               [&] { TokenDataset::open(dir.path("p")); });
}

}  // namespace
}  // namespace moebius
