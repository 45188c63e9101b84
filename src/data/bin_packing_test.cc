#include "data/bin_packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using Bins = std::vector<std::vector<int32_t>>;

TEST(BinPacking, BalancesSumsOfSquaredLengths) {
  // Bins {5} and {3, 3} have sums of squares of 25 and 18. By tokens alone, {5, 3} and {3} would do as well.
  EXPECT_EQ(bin_documents(std::vector<int32_t>{3, 5, 3}, 8, 2), (Bins{{1}, {0, 2}}));
  EXPECT_EQ(bin_documents(std::vector<int32_t>{}, 8, 2), (Bins{{}, {}}));
}

// Equal costs leave no bin with room for the last 4; the fullest bins that fit do.
TEST(BinPacking, FallsBackToBestFit) {
  EXPECT_EQ(bin_documents(std::vector<int32_t>{6, 4, 4, 3, 3}, 10, 2), (Bins{{0, 1}, {2, 3, 4}}));
}

TEST(BinPacking, ReturnsNothingIfDocumentsDoNotFit) {
  EXPECT_EQ(bin_documents(std::vector<int32_t>{9}, 8, 2), std::nullopt);
  EXPECT_EQ(bin_documents(std::vector<int32_t>{5, 5, 5}, 8, 2), std::nullopt);
}

TEST(BinPacking, EveryDocumentIsInOneBinWithinItsCapacity) {
  const Rng rng(3, RngSite::bench);
  for (int64_t trial = 0; trial < 200; ++trial) {
    std::vector<int32_t> lengths;
    for (int64_t i = 0; i < 12; ++i) lengths.push_back(1 + static_cast<int32_t>(rng.below(trial * 100 + i, 9)));
    const auto bins = bin_documents(lengths, 18, 4);
    if (!bins) continue;
    std::vector<int32_t> seen;
    for (const auto& bin : *bins) {
      int64_t tokens = 0;
      for (const int32_t document : bin) tokens += lengths[document];
      EXPECT_LE(tokens, 18);
      seen.insert(seen.end(), bin.begin(), bin.end());
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
  }
}

}  // namespace
}  // namespace moebius
