#include "data/packing.h"

#include <gtest/gtest.h>

#include "core/rng.h"

namespace moebius {

void PrintTo(const TokenSpan& span, std::ostream* out) { *out << "[" << span.begin << ", " << span.end << ")"; }

namespace {

std::vector<TokenSpan> packed(const std::vector<int64_t>& lengths, int64_t seq_len) {
  std::vector<int64_t> begins{0};
  for (const int64_t length : lengths) begins.push_back(begins.back() + length);
  return pack_documents(begins, seq_len);
}

using Spans = std::vector<TokenSpan>;

TEST(Packing, TakesWholeDocumentsForAsLongAsTheyFit) {
  EXPECT_EQ(packed({3, 5, 1, 4}, 7), (Spans{{0, 8}, {8, 13}})) << "8 tokens are 7 to read and their targets";
  EXPECT_EQ(packed({8, 8}, 7), (Spans{{0, 8}, {8, 16}}));
  EXPECT_EQ(packed({0, 2, 0, 0}, 7), (Spans{{0, 2}}));
  EXPECT_EQ(packed({}, 7), Spans{});
}

TEST(Packing, CutsADocumentThatIsTooLong) {
  EXPECT_EQ(packed({2, 17, 3}, 7), (Spans{{0, 2}, {2, 10}, {9, 17}, {16, 22}}));
  EXPECT_EQ(packed({9}, 7), (Spans{{0, 8}, {7, 9}}));
}

// Every token of a document but the first is the target of exactly one sample. That sample has all
// of its document before it, or the seq_len tokens before it where the document is cut.
TEST(Packing, EveryTokenIsPredictedOnce) {
  const Rng rng(3, RngSite::bench);
  for (int64_t trial = 0; trial < 50; ++trial) {
    std::vector<int64_t> lengths(1 + rng.below(1000 + trial, 30));
    for (size_t d = 0; d < lengths.size(); ++d) lengths[d] = static_cast<int64_t>(rng.below(100 * trial + d, 25));
    const int64_t seq_len = 1 + static_cast<int64_t>(rng.below(2000 + trial, 12));
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    std::vector<int> targets(total, 0);
    for (const TokenSpan& span : packed(lengths, seq_len)) {
      ASSERT_LE(span.end - span.begin, seq_len + 1);
      for (int64_t t = span.begin + 1; t < span.end; ++t) ++targets[t];
    }
    int64_t t = 0;
    for (const int64_t length : lengths) {
      for (int64_t i = 1; i < length; ++i) ASSERT_EQ(targets[t + i], 1) << trial << " " << t + i;
      ASSERT_LE(length > 0 ? targets[t] : 0, 1);
      t += length;
    }
  }
}

}  // namespace
}  // namespace moebius
