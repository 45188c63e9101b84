// `moebius bench step --ranks N` times the same step as on one rank, whatever the layout.
#include "bench/ranks.h"

#include "tests/distributed/ranks.h"
#include "train/testing.h"

namespace moebius {
namespace {

struct BenchLayout {
  const char* name;
  int ranks;
  ParallelSpec layout;
};

void PrintTo(const BenchLayout& c, std::ostream* out) { *out << c.name; }

const BenchLayout kLayouts[] = {
    {"dp2", 2, {}},        {"cp2", 2, {.cp = 2}}, {"tp2", 2, {.tp = 2}}, {"dp2_cp2_ep4", 4, {.cp = 2, .ep = 4}},
    {"pp2", 2, {.pp = 2}},
};

class BenchOnRanks : public ::testing::TestWithParam<BenchLayout> {};

RunSpec run_of(const ParallelSpec& layout) {
  RunSpec run = testing::tiny_run();
  run.model = model_spec_from_hf({{"model_type", "mixtral"},
                                  {"vocab_size", 12},
                                  {"hidden_size", 8},
                                  {"intermediate_size", 6},
                                  {"num_hidden_layers", 2},
                                  {"num_attention_heads", 4},
                                  {"num_key_value_heads", 2},
                                  {"num_local_experts", 4},
                                  {"num_experts_per_tok", 2},
                                  {"initializer_range", 0.5},
                                  {"max_position_embeddings", 16}},
                                 "test");
  run.train.seq_len = 8;
  run.parallel = layout;
  return run;
}

// Losses are sums over 64 tokens of f32 logits. They differ by a few units in the last place.
TEST_P(BenchOnRanks, HasTheLossesOfOneRank) {
  const BenchLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const RanksBench got = bench_step_of_ranks(run_of(c.layout), {.steps = 2}, world);
    if (world.rank() != 0) return;
    const std::unique_ptr<Transport> self = make_self_transport();
    const RanksBench expected = bench_step_of_ranks(run_of({}), {.steps = 2}, *self);
    EXPECT_NE(expected.first_loss, expected.last_loss);
    EXPECT_NEAR(got.first_loss, expected.first_loss, 1e-6 * expected.first_loss);
    EXPECT_NEAR(got.last_loss, expected.last_loss, 1e-5 * expected.last_loss);
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(expected.dispatcher, "local");
    EXPECT_EQ(got.dispatcher, c.layout.ep == 1 ? "local" : "direct") << "as a run takes it";
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, BenchOnRanks, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

}  // namespace
}  // namespace moebius
