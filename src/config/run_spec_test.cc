#include "config/run_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/spec_testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

const std::string kRecipes = std::string(MOEBIUS_SOURCE_DIR) + "/recipes/";

TEST(Recipes, AllParseAndCheck) {
  for (const char* name : {"demo", "tiny_cpu", "bench_cpu", "qwen3_30b_a3b", "mixtral_8x7b"}) {
    const RunSpec spec = load_run_spec(kRecipes + name + ".toml", {});
    EXPECT_NO_THROW(spec.check(1)) << name;
  }
}

TEST(Recipes, DemoIsWhatTheReadmeSays) {
  const RunSpec spec = load_run_spec(kRecipes + "demo.toml", {});
  EXPECT_GE(spec.model.num_experts, 8);
  EXPECT_EQ(spec.model.top_k, 2);
  EXPECT_GT(spec.model.shared_intermediate_size, 0);
  EXPECT_LT(spec.model.num_kv_heads, spec.model.num_heads);
  EXPECT_EQ(spec.precision.compute, DType::bf16);
  EXPECT_EQ(spec.dir, "runs/demo");
  EXPECT_NO_THROW(spec.check_trainable());
}

}  // namespace
}  // namespace moebius
