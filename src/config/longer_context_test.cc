#include "config/longer_context.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace moebius {
namespace {

using nlohmann::json;

TEST(LongerContext, TheTrainedPositionsAreThoseOfTheOldConfig) {
  const json yarn{{"rope_type", "yarn"}, {"factor", 4.0}};
  json want = yarn;
  want["original_max_position_embeddings"] = 64;
  const json config{{"max_position_embeddings", 64}, {"rope_theta", 500.0}},
      longer = with_longer_context(config, {{"max_position_embeddings", 256}, {"rope_scaling", yarn}});
  EXPECT_EQ(longer, (json{{"max_position_embeddings", 256}, {"rope_theta", 500.0}, {"rope_scaling", want}}));
  // A model that was extended before was trained on fewer positions than it has.
  want["original_max_position_embeddings"] = 16;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const json extended{{"max_position_embeddings", 64},
                        {name, {{"type", "yarn"}, {"rope_theta", 7.0}, {"original_max_position_embeddings", 16}}}};
    EXPECT_EQ(with_longer_context(extended, {{"rope_scaling", yarn}}),
              (json{{"max_position_embeddings", 64}, {"rope_theta", 7.0}, {"rope_scaling", want}}));
  }
  const json said{{"rope_type", "yarn"}, {"original_max_position_embeddings", 32}};
  EXPECT_EQ(with_longer_context(config, {{"rope_scaling", said}})["rope_scaling"], said);
  const json linear{{"rope_type", "linear"}, {"factor", 2.0}};
  EXPECT_EQ(with_longer_context(config, {{"rope_scaling", linear}})["rope_scaling"], linear);
}

TEST(LongerContext, ANewThetaHoldsInEverySpelling) {
  const json config{{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
  EXPECT_EQ(with_longer_context(config, {{"rope_theta", 1e6}}),
            (json{{"rope_parameters", {{"rope_type", "default"}}}, {"rope_theta", 1e6}}));
  EXPECT_TRUE(extends_context("rope_theta"));
  EXPECT_FALSE(extends_context("hidden_size"));
}

}  // namespace
}  // namespace moebius
