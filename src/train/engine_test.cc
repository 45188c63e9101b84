#include "train/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace moebius {
namespace {

using testing::HasSubstr;

// Petabytes: declared, measured and refused before any of it is asked for.
EngineSpec huge_spec(DeviceKind device) {
  return {.model = {.vocab_size = 1 << 20,
                    .hidden_size = 1 << 20,
                    .num_layers = 7,
                    .num_heads = 8,
                    .num_kv_heads = 8,
                    .head_dim = 1 << 17,
                    .max_position_embeddings = 33,
                    .moe_layers = std::vector<bool>(7, true),
                    .num_experts = 64,
                    .top_k = 2,
                    .moe_intermediate_size = 1 << 20},
          .use = ModelUse::training,
          .shape = {.batch = 3, .seq = 33, .max_segments = 3},
          .optimizer = OptimizerSpec{.lr = 0.5},
          .device = device};
}

TEST(Engine, RefusesAPlanThatTheMachineCannotHold) {
  const int64_t resident = current_rss_bytes();
  try {
    Engine engine(huge_spec(DeviceKind::cpu));
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(), HasSubstr("out of memory: "));
    EXPECT_THAT(e.what(), HasSubstr(" are available; use a smaller train.micro_batch, train.seq_len or model"));
    EXPECT_THAT(e.what(), HasSubstr("memory plan\n"));
    EXPECT_THAT(e.what(), HasSubstr("optimizer"));
  }
  EXPECT_LT(current_rss_bytes() - resident, 64 << 20);
}

TEST(Engine, CountsAPlanOfAnySizeOnTheNullDevice) {
  EXPECT_GT(Engine(huge_spec(DeviceKind::null)).plan().total_bytes(), int64_t{1} << 40);
}

}  // namespace
}  // namespace moebius
