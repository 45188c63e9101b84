// Every layout generates the same text: the tokens that one rank draws.
#include <gtest/gtest.h>

#include "infer/generate.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

struct GenerationCase {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model = {};
  DType compute = DType::f32;
};

void PrintTo(const GenerationCase& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

// Some prompts and chunks are multiples of tp, and some are not.
const GenerationCase kCases[] = {
    {"tp2", 2, {.tp = 2}},
    {"tp4", 4, {.tp = 4, .ep = 2}, {.latent_kv = true}},
    {"tp2_latent", 2, {.tp = 2}, {.latent_qkv = true}},
    {"tp2_gpt_oss", 2, {.tp = 2}, {.gpt_oss = true}},
    {"tp2_whole_norm", 2, {.tp = 2}, {.whole_norm = true}},
    {"tp2_latent_bias", 2, {.tp = 2}, {.latent_bias = true}},
    {"tp2_clipped", 2, {.tp = 2}, {.clipped = true}},
    {"tp2_tied", 2, {.tp = 2}, {.tied = true}},
    {"ep2", 2, {.ep = 2}},
    {"ep4_alltoall", 4, {.ep = 4, .dispatcher = DispatcherKind::alltoall}},
    {"ep4_over_tp2", 4, {.tp = 2, .ep = 4}, {.sigmoid = true}},
    {"ep4_skewed", 4, {.ep = 4}, {.skewed = true}},
    {"etp2", 2, {.etp = 2}},
    {"etp2_ep2_alltoall", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}},
    {"etp2_ep2_gpt_oss", 4, {.ep = 2, .etp = 2}, {.gpt_oss = true}},
    {"pp2", 2, {.pp = 2}},
    {"pp3_uneven", 3, {.pp = 3, .layout = "E t | t*3 | L"}},
    {"pp4", 4, {.pp = 4}, {.latent_qkv = true}},
    {"pp2_tied", 2, {.pp = 2}, {.tied = true}},
    {"pp2_vpp2_ep2", 4, {.pp = 2, .vpp = 2, .ep = 2}},
    {"pp2_mtp", 2, {.pp = 2}, {.mtp = 1}},
    {"pp3_mtp_apart", 3, {.pp = 3, .layout = "E t*2 | t*2 m | L"}, {.mtp = 1}},
    {"tp2_pp2_ep4", 8, {.tp = 2, .pp = 2, .ep = 4}, {.gpt_oss = true}},
    // Layouts that do not change the order of sums keep the bits, in bf16 too.
    {"bf16_pp2", 2, {.pp = 2}, {}, DType::bf16},
    {"bf16_pp3_uneven", 3, {.pp = 3, .layout = "E t | t*3 | L"}, {.latent_qkv = true}, DType::bf16},
    {"bf16_ep2_alltoall", 2, {.ep = 2, .dispatcher = DispatcherKind::alltoall}, {}, DType::bf16},
    {"bf16_ep4_alltoall", 4, {.ep = 4, .dispatcher = DispatcherKind::alltoall}, {.sigmoid = true}, DType::bf16},
    {"bf16_pp2_vpp2_ep2_alltoall",
     4,
     {.pp = 2, .vpp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall},
     {},
     DType::bf16},
};

std::vector<int32_t> continuation(Transport& world, const GenerationCase& c, const ParallelSpec& layout,
                                  const Sampling& sampling) {
  const LayoutModel& what = c.model;
  const ModelSpec model = layout_engine_spec(world, what, layout).model;
  EngineSpec spec =
      generation_engine_spec(model, c.compute, /*context=*/20, 1, /*chunk=*/3, mesh_shape(layout, world.size()));
  spec.pipeline = {.num_virtual = layout.vpp, .layout = layout.layout};
  spec.num_micro_batches = layout.vpp > 1 ? layout.pp : 1;
  spec.dispatcher = layout.dispatcher;
  spec.world = &world;
  spec.seed = 3;
  Engine engine(spec);
  init_layout(engine, what);
  return generate(engine, {.max_tokens = 13, .sampling = sampling}, std::vector<int32_t>{7, 1, 59, 30, 2, 2, 11})
      .tokens;
}

class Generation : public ::testing::TestWithParam<GenerationCase> {};

TEST_P(Generation, IsThatOfOneRank) {
  const GenerationCase& c = GetParam();
  for (const Sampling& sampling : {Sampling{.seed = 9}, Sampling{.temperature = 0}, Sampling{.top_p = 0.7}}) {
    const std::vector<int32_t> alone = continuation(*make_self_transport(), c, {}, sampling);
    EXPECT_EQ(alone.size(), 13u);
    run_ranks(c.ranks, [&](Transport& world) { EXPECT_EQ(continuation(world, c, c.layout, sampling), alone); });
  }
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Generation, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// An error is raised on every rank, with the message of one rank.
TEST(GenerationOnRanks, ErrorsAreRaisedOnEveryRank) {
  run_threads(2, test_world(), [&](Transport& world) {
    const ModelSpec model = layout_engine_spec(world, {}, {.tp = 2}).model;
    EngineSpec spec = generation_engine_spec(model, DType::f32, 6, 1, 3, mesh_shape({.tp = 2}, 2));
    spec.world = &world;
    Engine engine(spec);
    init_layout(engine, {});
    try {
      generate(engine, {.max_tokens = 5}, std::vector<int32_t>{1, 2});
      ADD_FAILURE() << "7 tokens in a context of 6";
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(),
                   "generate: prompt and continuation must fit the context of 6 tokens; got 2 + 5; shorten the prompt "
                   "or lower max-tokens");
    }
  });
}

}  // namespace
}  // namespace moebius
