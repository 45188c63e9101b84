#include "config/recipe/value_rule.h"

#include <gtest/gtest.h>

#include <limits>

namespace moebius {
namespace {

using nlohmann::json;

TEST(ValueRule, IntegersAreWholeAndInRange) {
  const ValueRule rule = integer_in(0, INT64_MAX);
  EXPECT_EQ(integer_in(2, 5).expects, "a whole number from 2 to 5");
  EXPECT_TRUE(rule.accepts(0));
  EXPECT_TRUE(rule.accepts(INT64_MAX));
  for (const json& bad : {json(-1), json(1.0), json("1"), json(true), json(), json(uint64_t{1} << 63)}) {
    EXPECT_FALSE(rule.accepts(bad)) << bad;
  }
}

TEST(ValueRule, NumbersAreFiniteAndInRange) {
  EXPECT_TRUE(number_above(0).accepts(1));
  EXPECT_TRUE(number_above(0).accepts(1e-300));
  EXPECT_FALSE(number_above(0).accepts(0.0));
  EXPECT_TRUE(number_at_least(0).accepts(0.0));
  EXPECT_TRUE(number_in(0, 1).accepts(0.0));
  EXPECT_FALSE(number_in(0, 1).accepts(1.0));
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(number_at_least(0).accepts(bad));
  }
  EXPECT_FALSE(number_at_least(0).accepts("1"));
  EXPECT_FALSE(number_at_least(0).accepts(true));
}

// A value that is not 0 must not become 0, infinite or 1 when it is stored as a float.
TEST(ValueRule, FloatsSurviveF32) {
  EXPECT_EQ(float_above_zero().expects, "a finite number above 0, from 1e-37 to 1e+37");
  EXPECT_EQ(float_or_zero(8).expects, "a finite number of at least 0: 0, or from 1e-37 to 8");
  for (const double good : {1e-37, 0.5, 1e30, 1e37}) EXPECT_TRUE(float_above_zero().accepts(good)) << good;
  for (const double bad : {-1.0, 0.0, 1e-46, 1e-38, 1e38, 1e39}) EXPECT_FALSE(float_above_zero().accepts(bad)) << bad;
  EXPECT_TRUE(float_or_zero().accepts(0));
  EXPECT_FALSE(float_or_zero().accepts(1e-46));
  EXPECT_FALSE(float_or_zero().accepts(1e39));
  EXPECT_TRUE(float_or_zero(8).accepts(8));
  EXPECT_FALSE(float_or_zero(8).accepts(8.5));
  EXPECT_TRUE(float_in_unit().accepts(0.0));
  EXPECT_TRUE(float_in_unit().accepts(0.9999));
  for (const double bad : {-0.5, 1e-46, 0.999999999999, 1.0}) EXPECT_FALSE(float_in_unit().accepts(bad)) << bad;
}

TEST(ValueRule, OneOfAcceptsOnlyItsNames) {
  EXPECT_EQ(one_of({"a", "b"}).expects, "\"a\" or \"b\"");
  EXPECT_TRUE(one_of({"a", "b"}).accepts("b"));
  EXPECT_FALSE(one_of({"a", "b"}).accepts("c"));
  EXPECT_FALSE(one_of({"a", "b"}).accepts(1));
}

TEST(Shown, QuotesStringsAndShortensLongValues) {
  EXPECT_EQ(shown("x"), "\"x\"");
  EXPECT_EQ(shown(json{1, 2}), "[1,2]");
  EXPECT_EQ(shown(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(shown(std::string(200, 'a')).size(), 83u);
}

}  // namespace
}  // namespace moebius
