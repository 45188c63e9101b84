#include "report/series.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace moebius {
namespace {

TEST(Series, AShortOneKeepsEachValue) {
  Series series(8);
  for (int i = 1; i <= 5; ++i) series.add(10 * i, i);
  ASSERT_EQ(series.bins().size(), 5u);
  EXPECT_EQ(series.bins()[2].first_step, 30);
  EXPECT_EQ(series.bins()[2].mean(), 3);
  EXPECT_EQ(series.last(), 5);
}

TEST(Series, ALongOneLosesNoSpikeAndNoRecord) {
  Series series(8);
  double sum = 0;
  for (int i = 1; i <= 1000; ++i) {
    const double value = i == 617 ? 1e6 : i == 618 ? -1e6 : i;
    sum += value;
    series.add(i, value);
  }
  ASSERT_LE(series.bins().size(), 8u);
  ASSERT_GT(series.bins().size(), 4u);
  double total = 0;
  int64_t count = 0, next = 1;
  for (const SeriesBin& bin : series.bins()) {
    EXPECT_EQ(bin.first_step, next);
    EXPECT_EQ(bin.last_step - bin.first_step + 1, bin.count);
    next = bin.last_step + 1;
    total += bin.sum;
    count += bin.count;
    const bool has_spike = bin.first_step <= 617 && 617 <= bin.last_step;
    EXPECT_EQ(bin.max, has_spike ? 1e6 : static_cast<double>(bin.last_step));
  }
  EXPECT_EQ(count, 1000);
  EXPECT_DOUBLE_EQ(total, sum);
  EXPECT_EQ(series.max(), 1e6);
  EXPECT_EQ(series.min(), -1e6);
}

TEST(Series, CoarserBinsHoldAllRecords) {
  Series series;
  for (int i = 1; i <= 100; ++i) series.add(i, i % 7);
  const std::vector<SeriesBin> bins = series.bins(9);
  EXPECT_LE(bins.size(), 9u);
  int64_t count = 0;
  for (const SeriesBin& bin : bins) count += bin.count;
  EXPECT_EQ(count, 100);
  EXPECT_EQ(bins.back().last_step, 100);
}

TEST(Series, ValuesThatAreNotFiniteAreCounted) {
  Series series;
  series.add(1, std::nan(""));
  series.add(2, std::numeric_limits<double>::infinity());
  EXPECT_TRUE(series.empty());
  EXPECT_EQ(series.not_finite(), 2);
}

TEST(Series, NoSumOverflows) {
  Series series(2);
  for (int i = 1; i <= 100; ++i) series.add(i, i % 2 == 0 ? 1e308 : 1e290);
  series.add(101, 5e-324);
  EXPECT_EQ(series.not_finite(), 50);
  EXPECT_TRUE(std::isfinite(series.bins()[0].mean()));
  EXPECT_EQ(series.last(), 0);
  Grid grid(2);
  for (int i = 1; i <= 100; ++i) grid.add(i, std::vector<double>{1e30, 1e31});
  EXPECT_FLOAT_EQ(grid.columns()[0].mean(0), 1e30);
  EXPECT_TRUE(std::isnan(grid.columns()[0].mean(1)));
}

TEST(Grid, ColumnsAreMeansOfTheirRecords) {
  Grid grid(4);
  for (int i = 1; i <= 16; ++i) grid.add(i, std::vector<double>{1.0 * i, std::nan(""), 100});
  ASSERT_EQ(grid.columns().size(), 4u);
  EXPECT_EQ(grid.columns()[0].mean(0), 2.5);
  EXPECT_TRUE(std::isnan(grid.columns()[0].mean(1)));
  EXPECT_EQ(grid.columns()[3].mean(2), 100);
  EXPECT_EQ(grid.recent_mean(0, 1), 14.5);
  EXPECT_EQ(grid.recent_mean(0, 99), 8.5);
  EXPECT_EQ(grid.rows(), 3);
}

TEST(Grid, TheNumberOfRowsMayChange) {
  Grid grid(2);
  grid.add(1, std::vector<double>{1});
  for (int i = 2; i <= 9; ++i) grid.add(i, std::vector<double>{1, 5});
  EXPECT_EQ(grid.rows(), 2);
  EXPECT_EQ(grid.columns()[0].mean(1), 5);
  EXPECT_TRUE(std::isnan(grid.columns()[0].mean(2)));
}

}  // namespace
}  // namespace moebius
