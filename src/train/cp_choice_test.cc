#include "train/cp_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moebius {
namespace {

using testing::ElementsAre;

TEST(CpChoice, DocumentsStayWholeAndPaddingFillsTheGaps) {
  // 3, 4 and 5 rows, and 4 of padding, for 2 blocks of 8.
  const SampleDocuments sample{.begins = {0, 3, 7}, .end = 12, .rows = 16};
  EXPECT_THAT(sample.lengths(), ElementsAre(3, 4, 5));
  EXPECT_EQ(sample.cost(), 9 + 16 + 25 + 4);
  EXPECT_THAT(*arrange_documents(sample, 2, 1), ElementsAre(7, 8, 9, 10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 5, 6, 15));
  EXPECT_THAT(*arrange_documents(sample, 2, 2), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  EXPECT_EQ(arrange_documents(sample, 4, 1), std::nullopt) << "5 rows in blocks of 4";
}

TEST(CpChoice, CountsThePairsOfTheBusiestRank) {
  const SampleDocuments sample{.begins = {0, 3, 7}, .end = 12, .rows = 16};
  // 1 + 2 + ... + 5 and 3 of padding; 6 + 10 and 1.
  EXPECT_EQ(busiest_rank(sample, *arrange_documents(sample, 2, 1), 2, 1), 18);
  // One document on 4 ranks: pieces 0 and 7 of 2 rows have the pairs 1, 2, 15, 16.
  const SampleDocuments one{.begins = {0}, .end = 16, .rows = 16};
  EXPECT_EQ(busiest_rank(one, *arrange_documents(one, 4, 4), 4, 4), 34);
}

TEST(CpChoice, FewRanksShareShortDocumentsAndAllShareALongOne) {
  EXPECT_EQ(choose_sharing({.begins = {0, 4, 8, 12}, .end = 16, .rows = 16}, 4), 1);
  EXPECT_EQ(choose_sharing({.begins = {0, 8}, .end = 16, .rows = 16}, 4), 2);
  EXPECT_EQ(choose_sharing({.begins = {0}, .end = 16, .rows = 16}, 4), 4);
  // One of 16 rows fits on one of two ranks, which then has 136 pairs. Where both share it, the busier has 108: its
  // second half, and 8 rows of padding. One of 4 rows has 10 and 9, which is no reason to share.
  EXPECT_EQ(choose_sharing({.begins = {0}, .end = 16, .rows = 32}, 2), 2);
  EXPECT_EQ(choose_sharing({.begins = {0}, .end = 4, .rows = 16}, 4), 1);
}

}  // namespace
}  // namespace moebius
