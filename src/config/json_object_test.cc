#include "config/json_object.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace moebius {
namespace {

using nlohmann::json;

TEST(JsonObject, ComparesByValueAndAnAbsentOneIsNotEmpty) {
  const JsonObject none, empty = json::object(), one = json{{"a", 1}}, copy = one;
  EXPECT_FALSE(none);
  EXPECT_TRUE(empty);
  EXPECT_EQ(none, JsonObject());
  EXPECT_NE(none, empty);
  EXPECT_NE(empty, none);
  EXPECT_EQ(one, (JsonObject(json{{"a", 1}})));
  EXPECT_NE(one, (JsonObject(json{{"a", 2}})));
  EXPECT_EQ(&*copy, &*one);
  EXPECT_EQ(copy->at("a"), 1);
}

TEST(JsonObject, RefusesValuesThatAreNotObjects) {
  for (const json& value : {json(), json::array({1}), json("a")}) EXPECT_THROW(JsonObject{value}, Error);
}

}  // namespace
}  // namespace moebius
