// The same model on every layout. Each row trains on its ranks, and on one, for 20 steps (fewer
// under the sanitizers).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tests/built.h"
#include "tests/distributed/choice_gap.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

// Threads train for long. Ranks in processes run the same code with other messages, so a few steps show those.
int64_t num_steps() { return is_under_address_sanitizer() || process_world() != nullptr ? 3 : 20; }

struct LayoutCase {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model = {};
};

void PrintTo(const LayoutCase& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

const LayoutCase kCases[] = {
    {"alone", 1, {}},
    {"dp2", 2, {}},
    {"dp3", 3, {}},
    {"dp4", 4, {}},
    {"dp2_sigmoid", 2, {}, {.sigmoid = true}},
    {"dp4_sigmoid", 4, {}, {.sigmoid = true}},
    {"dp2_skewed", 2, {}, {.skewed = true}},
    {"dp3_tied", 3, {}, {.tied = true}},
    {"cp2_ring", 2, {.cp = 2, .cp_comm = CpComm::ring}},
    {"cp2_alltoall", 2, {.cp = 2, .cp_comm = CpComm::alltoall}},
    {"cp4_hierarchical", 4, {.cp = 4, .cp_comm = CpComm::hierarchical, .cp_inner = 2}},
    {"cp4_ring_skewed", 4, {.cp = 4, .cp_comm = CpComm::ring}, {.skewed = true}},
    {"tp2_cp2_ring_dp2", 8, {.tp = 2, .cp = 2, .cp_comm = CpComm::ring}},
    {"cp2_alltoall_pp2", 4, {.cp = 2, .pp = 2, .cp_comm = CpComm::alltoall}},
    {"pp2", 2, {.pp = 2}},
    {"pp4", 4, {.pp = 4}},
    {"pp2_vpp2", 2, {.pp = 2, .vpp = 2}},
    {"pp3_uneven", 3, {.pp = 3, .layout = "E t | t*2 | t L"}},
    {"pp2_dp2", 4, {.pp = 2}},
    {"pp4_zb_h1", 4, {.pp = 4, .schedule = PipelineSchedule::zb_h1}},
    {"pp2_zb_h1_dp2_tied", 4, {.pp = 2, .schedule = PipelineSchedule::zb_h1}, {.tied = true}},
    {"tp2_pp2_zb_h1_ep2_etp2_mtp",
     8,
     {.tp = 2, .pp = 2, .ep = 2, .etp = 2, .schedule = PipelineSchedule::zb_h1},
     {.mtp = 2}},
    {"cp2_ring_pp2_zb_h1_latent",
     4,
     {.cp = 2, .pp = 2, .schedule = PipelineSchedule::zb_h1, .cp_comm = CpComm::ring},
     {.latent_qkv = true}},
    {"pp3_zb_h1_ep2_direct_skewed",
     6,
     {.pp = 3,
      .ep = 2,
      .layout = "E t | t*2 | t L",
      .schedule = PipelineSchedule::zb_h1,
      .dispatcher = DispatcherKind::direct},
     {.skewed = true}},
    {"pp2_zb_h1_ep4_two_level_gpt_oss",
     8,
     {.pp = 2,
      .ep = 4,
      .schedule = PipelineSchedule::zb_h1,
      .dispatcher = DispatcherKind::two_level,
      .ranks_per_node = 2},
     {.gpt_oss = true}},
    {"pp2_zb_h1_ep2_alltoall_frozen",
     4,
     {.pp = 2, .ep = 2, .schedule = PipelineSchedule::zb_h1, .dispatcher = DispatcherKind::alltoall},
     {.freeze = kParts}},
    {"pp2_vpp2_dp2", 4, {.pp = 2, .vpp = 2}},
    {"pp2_dp3_sigmoid", 6, {.pp = 2}, {.sigmoid = true}},
    {"pp2_vpp2_dp2_skewed", 4, {.pp = 2, .vpp = 2}, {.skewed = true}},
    {"pp2_tied", 2, {.pp = 2}, {.tied = true}},
    {"pp2_ep2", 4, {.pp = 2, .ep = 2}},
    {"pp2_ep4", 8, {.pp = 2, .ep = 4}},
    {"pp2_vpp2_ep2", 4, {.pp = 2, .vpp = 2, .ep = 2}},
    {"pp2_vpp2_ep2_sigmoid", 4, {.pp = 2, .vpp = 2, .ep = 2}, {.sigmoid = true}},
    {"pp2_vpp2_ep2_skewed", 4, {.pp = 2, .vpp = 2, .ep = 2}, {.skewed = true}},
    {"pp2_vpp2_dp2_tied", 4, {.pp = 2, .vpp = 2}, {.tied = true}},
    {"tp2", 2, {.tp = 2}},
    {"tp2_dp2", 4, {.tp = 2}},
    {"tp2_pp2_tied", 4, {.tp = 2, .pp = 2}, {.tied = true}},
    {"tp2_sigmoid", 2, {.tp = 2}, {.sigmoid = true}},
    {"cp2", 2, {.cp = 2}},
    {"cp2_dp2", 4, {.cp = 2}},
    {"tp2_cp2", 4, {.tp = 2, .cp = 2}},
    {"tp2_frozen_norm", 2, {.tp = 2}, {.whole_norm = true, .freeze = {"*.q_norm.*"}}},
    {"dp2_clipped", 2, {}, {.clipped = true}},
    {"tp2_clipped", 2, {.tp = 2}, {.clipped = true}},
    {"cp2_clipped", 2, {.cp = 2}, {.clipped = true}},
    {"cp2_alltoall_clipped", 2, {.cp = 2, .cp_comm = CpComm::alltoall}, {.clipped = true}},
    {"tp2_cp2_ring_pp2_clipped", 8, {.tp = 2, .cp = 2, .pp = 2, .cp_comm = CpComm::ring}, {.clipped = true}},
    {"tp2_latent_bias", 2, {.tp = 2}, {.latent_bias = true}},
    {"tp2_cp2_pp2_latent_bias", 8, {.tp = 2, .cp = 2, .pp = 2}, {.latent_bias = true}},
    {"tp2_latent", 2, {.tp = 2}, {.latent_qkv = true}},
    {"tp4_latent_kv", 4, {.tp = 4}, {.latent_kv = true}},
    {"cp2_ring_latent_kv", 2, {.cp = 2, .cp_comm = CpComm::ring}, {.latent_kv = true}},
    {"cp2_alltoall_tp2_latent", 4, {.tp = 2, .cp = 2, .cp_comm = CpComm::alltoall}, {.latent_qkv = true}},
    {"cp4_hierarchical_latent", 4, {.cp = 4, .cp_comm = CpComm::hierarchical, .cp_inner = 2}, {.latent_qkv = true}},
    {"tp2_cp2_ep4_pp2_latent", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.latent_qkv = true}},
    {"ep2", 2, {.ep = 2}},
    {"ep2_edp2", 4, {.ep = 2}},
    {"ep4", 4, {.ep = 4}},
    {"ep8_over_tp2_sigmoid", 8, {.tp = 2, .ep = 8}, {.sigmoid = true}},
    {"ep4_skewed", 4, {.ep = 4}, {.skewed = true}},
    {"ep2_over_tp2", 2, {.tp = 2, .ep = 2}},
    {"ep2_over_cp2", 2, {.cp = 2, .ep = 2}},
    {"ep4_over_tp2_cp2", 4, {.tp = 2, .cp = 2, .ep = 4}},
    {"ep4_alltoall", 4, {.ep = 4, .dispatcher = DispatcherKind::alltoall}},
    {"ep4_allgather", 4, {.ep = 4, .dispatcher = DispatcherKind::allgather}},
    {"ep4_alltoall_skewed", 4, {.ep = 4, .dispatcher = DispatcherKind::alltoall}, {.skewed = true}},
    {"etp2_ep2_alltoall", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}},
    {"ep2_direct", 2, {.ep = 2, .dispatcher = DispatcherKind::direct}},
    {"ep4_direct", 4, {.ep = 4, .dispatcher = DispatcherKind::direct}},
    {"ep4_direct_skewed", 4, {.ep = 4, .dispatcher = DispatcherKind::direct}, {.skewed = true}},
    {"etp3_direct_pp2_frozen", 6, {.pp = 2, .etp = 3, .dispatcher = DispatcherKind::direct}, {.freeze = kParts}},
    {"etp2_ep2_direct", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}},
    {"ep8_over_tp2_direct_sigmoid", 8, {.tp = 2, .ep = 8, .dispatcher = DispatcherKind::direct}, {.sigmoid = true}},
    {"pp2_vpp2_ep2_direct_skewed",
     4,
     {.pp = 2, .vpp = 2, .ep = 2, .dispatcher = DispatcherKind::direct},
     {.skewed = true}},
    {"ep2_over_cp2_direct_capacity", 2, {.cp = 2, .ep = 2, .dispatcher = DispatcherKind::direct}, {.capacity = true}},
    {"etp2_ep2_direct_gpt_oss", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}, {.gpt_oss = true}},
    {"ep4_direct_mtp", 4, {.ep = 4, .dispatcher = DispatcherKind::direct}, {.mtp = 2}},
    {"ep4_two_level", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}},
    {"ep4_two_level_skewed",
     4,
     {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2},
     {.skewed = true}},
    {"pp2_ep4_over_tp2_two_level",
     8,
     {.tp = 2, .pp = 2, .ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}},
    {"ep4_over_cp2_two_level_capacity",
     4,
     {.cp = 2, .ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2},
     {.capacity = true}},
    {"dp2_capacity", 2, {}, {.capacity = true}},
    {"dp2_capacity_by_weight", 2, {}, {.by_weight = true}},
    {"ep4_over_tp2_cp2_capacity_by_weight", 4, {.tp = 2, .cp = 2, .ep = 4}, {.by_weight = true}},
    {"ep4_over_tp2_cp2_capacity", 4, {.tp = 2, .cp = 2, .ep = 4}, {.capacity = true}},
    {"ep2_over_cp2_alltoall_capacity",
     2,
     {.cp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall},
     {.capacity = true}},
    {"ep4_over_tp2_cp2_sinkhorn", 4, {.tp = 2, .cp = 2, .ep = 4}, {.sinkhorn = true}},
    {"ep4_over_tp2_cp2_jitter", 4, {.tp = 2, .cp = 2, .ep = 4}, {.jitter = true}},
    {"etp2", 2, {.etp = 2}},
    {"etp2_over_tp2", 2, {.tp = 2, .etp = 2}},
    {"etp2_ep2", 4, {.ep = 2, .etp = 2}},
    {"etp2_ep2_over_tp2_skewed", 4, {.tp = 2, .ep = 2, .etp = 2}, {.skewed = true}},
    {"pp2_vpp2_ep4_over_tp2_sigmoid", 8, {.tp = 2, .pp = 2, .vpp = 2, .ep = 4}, {.sigmoid = true}},
    {"tp2_cp2_ep4_pp2", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}},
    {"tp2_cp2_ep4_pp2_skewed", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.skewed = true}},
    {"dp2_gpt_oss", 2, {}, {.gpt_oss = true}},
    {"tp2_gpt_oss", 2, {.tp = 2}, {.gpt_oss = true}},
    {"cp2_gpt_oss", 2, {.cp = 2}, {.gpt_oss = true}},
    {"cp2_ring_gpt_oss", 2, {.cp = 2, .cp_comm = CpComm::ring}, {.gpt_oss = true}},
    {"cp2_ring_windows_allgather_gpt_oss",
     2,
     {.cp = 2, .cp_comm = CpComm::ring, .cp_comm_window = CpComm::allgather},
     {.gpt_oss = true}},
    {"cp2_alltoall_gpt_oss", 2, {.cp = 2, .cp_comm = CpComm::alltoall}, {.gpt_oss = true}},
    {"ep2_pp2_gpt_oss", 4, {.pp = 2, .ep = 2}, {.gpt_oss = true}},
    {"etp2_ep2_gpt_oss", 4, {.ep = 2, .etp = 2}, {.gpt_oss = true}},
    {"etp2_ep2_alltoall_gpt_oss", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}, {.gpt_oss = true}},
    {"etp2_over_tp2_gpt_oss", 2, {.tp = 2, .etp = 2}, {.gpt_oss = true}},
    {"ep4_over_tp2_cp2_ring_gpt_oss", 4, {.tp = 2, .cp = 2, .ep = 4, .cp_comm = CpComm::ring}, {.gpt_oss = true}},
    {"tp2_pp2_vpp2_ep2_etp2_tied", 8, {.tp = 2, .pp = 2, .vpp = 2, .ep = 2, .etp = 2}, {.tied = true}},
    {"dp2_mtp", 2, {}, {.mtp = 2}},
    {"tp2_mtp", 2, {.tp = 2}, {.mtp = 2}},
    {"cp2_mtp", 2, {.cp = 2}, {.mtp = 2}},
    {"cp2_ring_mtp", 2, {.cp = 2, .cp_comm = CpComm::ring}, {.mtp = 2}},
    {"pp2_mtp", 2, {.pp = 2}, {.mtp = 2}},
    {"pp2_mtp_tied", 2, {.pp = 2}, {.tied = true, .mtp = 1}},
    {"pp3_uneven_mtp", 3, {.pp = 3, .layout = "E t*2 | t*2 | m*2 L"}, {.mtp = 2}},
    {"pp3_mtp_apart", 3, {.pp = 3, .layout = "E t*2 | t*2 m*2 | L"}, {.mtp = 2}},
    {"pp3_mtp_alone_tied", 3, {.pp = 3, .layout = "E t*4 | m | L"}, {.tied = true, .mtp = 1}},
    {"pp3_vpp2_mtp_apart_dp2", 6, {.pp = 3, .vpp = 2, .layout = "E | t | t | t*2 | m*2 | L"}, {.mtp = 2}},
    {"tp2_pp4_mtp_apart_tied", 8, {.tp = 2, .pp = 4, .layout = "E t | t*2 | t m | L"}, {.tied = true, .mtp = 1}},
    {"pp2_vpp2_dp2_mtp", 4, {.pp = 2, .vpp = 2}, {.mtp = 2}},
    {"ep4_alltoall_mtp", 4, {.ep = 4, .dispatcher = DispatcherKind::alltoall}, {.mtp = 2}},
    {"etp2_ep2_over_tp2_mtp", 4, {.tp = 2, .ep = 2, .etp = 2}, {.mtp = 2}},
    {"tp2_cp2_ep4_pp2_mtp", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.mtp = 2}},
    {"tp2_pp2_vpp2_ep2_etp2_mtp_tied", 8, {.tp = 2, .pp = 2, .vpp = 2, .ep = 2, .etp = 2}, {.tied = true, .mtp = 1}},
    {"dp3_frozen", 3, {}, {.freeze = kParts}},
    {"dp2_frozen_below", 2, {}, {.freeze = kBelow}},
    {"tp2_cp2_frozen_below_gpt_oss", 4, {.tp = 2, .cp = 2}, {.gpt_oss = true, .freeze = kBelow}},
    {"pp2_dp2_frozen_below", 4, {.pp = 2, .layout = "Ettt|tL"}, {.freeze = kBelow}},
    {"tp2_frozen", 2, {.tp = 2}, {.freeze = kParts}},
    {"cp2_frozen", 2, {.cp = 2}, {.freeze = kParts}},
    {"pp2_vpp2_dp2_frozen", 4, {.pp = 2, .vpp = 2}, {.freeze = kParts}},
    {"etp2_ep2_alltoall_frozen", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}, {.freeze = kParts}},
    {"tp2_cp2_ep4_pp2_frozen", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.freeze = kParts}},
    {"pp2_frozen_stage", 2, {.pp = 2}, {.freeze = kStage}},
    {"pp4_dp2_frozen_stage", 8, {.pp = 4}, {.freeze = kStage}},
    {"dp3_frozen_tied", 3, {}, {.tied = true, .freeze = kTable}},
    {"tp2_pp2_frozen_tied", 4, {.tp = 2, .pp = 2}, {.tied = true, .freeze = kTable}},
    {"pp2_vpp2_dp2_frozen_tied", 4, {.pp = 2, .vpp = 2}, {.tied = true, .freeze = kTable}},
    {"tp2_pp2_ep2_frozen_norm", 4, {.tp = 2, .pp = 2, .ep = 2}, {.whole_norm = true, .freeze = {"*.q_norm.*"}}},
    {"pp2_dp2_frozen_mtp", 4, {.pp = 2}, {.mtp = 2, .freeze = kAhead}},
    {"tp2_ep2_etp2_frozen_mtp", 4, {.tp = 2, .ep = 2, .etp = 2}, {.mtp = 2, .freeze = kAhead}},
    {"pp2_ep2_frozen_mtp_tied",
     4,
     {.pp = 2, .ep = 2},
     {.tied = true, .mtp = 1, .freeze = {"model.embed_tokens.weight"}}},
    {"tp2_ep2_etp2_frozen_gpt_oss", 4, {.tp = 2, .ep = 2, .etp = 2}, {.gpt_oss = true, .freeze = kSmall}},
    {"dp3_lora", 3, {}, {.lora = true}},
    {"tp2_lora", 2, {.tp = 2}, {.lora = true}},
    {"cp2_lora", 2, {.cp = 2}, {.lora = true}},
    {"pp2_vpp2_dp2_lora", 4, {.pp = 2, .vpp = 2}, {.lora = true}},
    {"ep4_lora", 4, {.ep = 4}, {.lora = true}},
    {"etp2_lora", 2, {.etp = 2}, {.lora = true}},
    {"etp2_ep2_alltoall_lora", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}, {.lora = true}},
    {"ep4_two_level_lora", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}, {.lora = true}},
    {"etp2_ep2_direct_lora", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}, {.lora = true}},
    {"etp2_ep2_over_tp2_lora", 4, {.tp = 2, .ep = 2, .etp = 2}, {.lora = true}},
    {"tp2_cp2_ep4_pp2_lora", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.lora = true}},
    {"tp2_lora_dropout", 2, {.tp = 2}, {.lora = true, .dropout = true}},
    {"cp2_dp2_lora_dropout", 4, {.cp = 2}, {.lora = true, .dropout = true}},
    {"ep4_allgather_lora_dropout",
     4,
     {.ep = 4, .dispatcher = DispatcherKind::allgather},
     {.lora = true, .dropout = true}},
    {"etp2_ep2_alltoall_lora_dropout",
     4,
     {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall},
     {.lora = true, .dropout = true}},
    {"etp2_ep2_direct_lora_dropout",
     4,
     {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct},
     {.lora = true, .dropout = true}},
    {"tp2_cp2_ep4_pp2_lora_dropout", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}, {.lora = true, .dropout = true}},
    {"dp2_latent_mtp", 2, {}, {.mtp = 1, .latent = true}},
    {"pp2_ep2_latent_mtp", 4, {.pp = 2, .ep = 2}, {.mtp = 1, .latent = true}},
    {"pp2_vpp2_dp2_latent_mtp", 4, {.pp = 2, .vpp = 2}, {.mtp = 1, .latent = true}},
};

// One run on one rank serves every layout of the same model.
const LayoutOutcome& alone(const LayoutModel& what) {
  static std::mutex mutex;
  static std::map<LayoutModel, LayoutOutcome> runs;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = runs.try_emplace(what);
  if (is_new) at->second = train_alone(what, num_steps());
  return at->second;
}

// The guard of the comparisons below must see a tie wherever a choice can have one.
TEST(ChoiceGap, IsTheSmallestOverGroupsAndTheirExperts) {
  ModelSpec m{.num_experts = 6, .top_k = 2};
  EXPECT_DOUBLE_EQ(choice_gap({5, 1, 3, 2.5, 0, 4}, m), 1);
  EXPECT_EQ(choice_gap({5, 1, 3, 3, 0, 3}, m), 0);
  m.n_group = 3;
  m.topk_group = 2;
  // The groups have 5, 3 and 4.75. The experts of the second group do not count.
  EXPECT_DOUBLE_EQ(choice_gap({5, 1, 3, 2.5, 0, 4.75}, m), 1.75);
  EXPECT_DOUBLE_EQ(choice_gap({5, 4.5, 3, 2.5, 0, 4.75}, m), 0.25);  // gap of experts in the chosen groups
  m.topk_group = 3;
  m.top_k = 6;
  EXPECT_EQ(choice_gap({5, 1, 4.5, 2.5, 0, 4.75}, m), std::numeric_limits<double>::infinity());
}

class AutoDispatcher : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, AutoDispatcher, ::testing::Values(2, 4), name_of_ranks);

// In training, and only there, the ranks find out that they reach each other's memory.
TEST_P(AutoDispatcher, IsDirectInTrainingOnOneMachine) {
  run([](Transport& world) {
    EngineSpec spec = layout_engine_spec(world, {}, {.ep = world.size()}, {});
    spec.dispatcher = DispatcherKind::automatic;
    const Engine engine(spec);
    EXPECT_EQ(engine.spec().dispatcher, DispatcherKind::direct);
    EXPECT_THAT(engine.dispatcher().reason,
                ::testing::StartsWith(fmt::format(
                    "chosen by \"auto\" because the {} ranks that share experts are on one machine and can access each "
                    "other's memory: a token is written once to each rank that has any of its experts, which "
                    "sends the least (",
                    world.size())));
    spec.optimizer.reset();
    spec.use = ModelUse::inference;
    EXPECT_EQ(Engine(spec).spec().dispatcher, resolved(spec).dispatcher);
    EXPECT_NE(Engine(spec).spec().dispatcher, DispatcherKind::direct);
  });
}

class TwoLevel : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, TwoLevel, ::testing::Values(4, 8), name_of_ranks);

// The nodes are pretended: they are on one machine.
TEST_P(TwoLevel, TrainsWithTheBitsOfAllGather) {
  run([](Transport& world) {
    const auto with = [&](DispatcherKind dispatcher) {
      return train_briefly(world, {}, {.ep = world.size(), .dispatcher = dispatcher, .ranks_per_node = 2});
    };
    expect_same_bits(with(DispatcherKind::two_level), with(DispatcherKind::allgather));
  });
}

class Layouts : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(Layouts, TrainTheSameModel) {
  const LayoutCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got = train_on(world, c.model, c.layout, num_steps());
    if (world.rank() == 0) expect_same(got, alone(c.model));
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Layouts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// With overlap, gradients are reduced during the backward pass, weights are gathered during the
// forward pass, and stages send during compute.
// The numbers are added in the same order as without.
class Overlap : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(Overlap, ChangesNoBit) {
  const LayoutCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome overlapped = train_briefly(world, c.model, c.layout);
    const LayoutOutcome alone = train_briefly(world, c.model, c.layout, {.overlap = false});
    expect_same_bits(overlapped, alone);
    if (c.layout.ep * c.layout.etp > 1)
      expect_same_bits(train_briefly(world, c.model, with_expert_overlap(c.layout)), alone);
  });
}

const LayoutCase kOverlapCases[] = {
    {"dp2", 2, {}},
    {"dp3", 3, {}},
    {"ep2_edp2", 4, {.ep = 2}},
    {"ep2_etp2_direct", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}},
    {"ep4_two_level", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}},
    {"tp2_ep2_alltoall", 2, {.tp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall}},
    {"pp2_vpp2_dp2_tied", 4, {.pp = 2, .vpp = 2}, {.tied = true}},
    {"tp2_cp2_ep4_pp2", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}},
    {"pp2_etp2_ep2_lora", 8, {.pp = 2, .ep = 2, .etp = 2}, {.lora = true}},
};

INSTANTIATE_TEST_SUITE_P(Everywhere, Overlap, ::testing::ValuesIn(kOverlapCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// A budget of rows of experts changes no bit. Here all rows have pages; tests/distributed/expert_rows_test.cc has those
// that have none.
class ExpertRowBudget : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(ExpertRowBudget, ChangesNoBit) {
  const LayoutCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome unbounded = train_briefly(world, c.model, c.layout);
    EXPECT_FALSE(unbounded.steps.back().expert_rows);
    for (const double budget : {1.25, 0.1}) {
      SCOPED_TRACE(budget);
      const LayoutOutcome got = train_briefly(world, c.model, c.layout, {.expert_rows = budget});
      expect_same_bits(got, unbounded);
      ASSERT_TRUE(got.steps.back().expert_rows);
    }
  });
}

const LayoutCase kBudgetCases[] = {
    {"ep2", 2, {.ep = 2}},
    {"ep4_skewed", 4, {.ep = 4, .dispatcher = DispatcherKind::allgather}, {.skewed = true}},
    {"ep4_alltoall_skewed", 4, {.ep = 4, .dispatcher = DispatcherKind::alltoall}, {.skewed = true}},
    {"ep4_direct_skewed", 4, {.ep = 4, .dispatcher = DispatcherKind::direct}, {.skewed = true}},
    {"ep4_two_level_skewed",
     4,
     {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2},
     {.skewed = true}},
    {"pp2_ep2", 4, {.pp = 2, .ep = 2}},
    {"pp2_vpp2_ep2_lora", 4, {.pp = 2, .vpp = 2, .ep = 2}, {.lora = true}},
    {"ep4_mtp", 4, {.ep = 4}, {.mtp = 1}},
    {"tp2_ep2_gpt_oss", 2, {.tp = 2, .ep = 2}, {.gpt_oss = true}},
};

INSTANTIATE_TEST_SUITE_P(Everywhere, ExpertRowBudget, ::testing::ValuesIn(kBudgetCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// Recomputation in the backward pass sends the same messages as the forward pass.
class Recompute : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(Recompute, ChangesNoBit) {
  const LayoutCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome kept = train_briefly(world, c.model, c.layout);
    for (const auto& [name, flag] : kRecomputeNames) {
      SCOPED_TRACE(name);
      LayoutWay way;
      way.recompute.*flag = true;
      expect_same_bits(train_briefly(world, c.model, c.layout, way), kept);
    }
    LayoutWay some_layers;
    some_layers.recompute.norm = true;
    some_layers.recompute.ranges = {{.what = &RecomputeSpec::expert_up, .first = 1, .last = 1},
                                    {.what = &RecomputeSpec::layer, .first = 2, .last = 8}};
    expect_same_bits(train_briefly(world, c.model, c.layout, some_layers), kept);
  });
}

// Activations on the host are those that were kept on the device. The copies on a CPU run as late as they may on a GPU.
class Offload : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(Offload, ChangesNoBit) {
  const LayoutCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome kept = train_briefly(world, c.model, c.layout);
    LayoutWay inputs, all, some;
    inputs.offload.layer_input = inputs.recompute.layer = true;
    all.offload.tensors.layer = true;
    some.offload = {.tensors = {.qkv = true, .attention = true}, .fraction = 0.5};
    some.recompute.norm = true;
    some.overlap = false;
    for (const LayoutWay& way : {inputs, all, some}) {
      const LayoutOutcome got = train_briefly(world, c.model, c.layout, way);
      expect_same_bits(got, kept);
      EXPECT_TRUE(got.steps.back().offload_bytes.has_value());
    }
    EXPECT_FALSE(kept.steps.back().offload_bytes.has_value());
  });
}

const LayoutCase kOffloadCases[] = {
    {"tp2_ep2_alltoall", 2, {.tp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall}},
    {"cp2_ring_capacity", 2, {.cp = 2, .cp_comm = CpComm::ring}, {.capacity = true}},
    {"ep2_etp2_direct", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}},
    {"pp2", 2, {.pp = 2}},
    {"pp4_tied", 4, {.pp = 4}, {.tied = true}},
    {"pp2_vpp2_ep2", 4, {.pp = 2, .vpp = 2, .ep = 2}},
    {"pp2_uneven_mtp", 2, {.pp = 2, .layout = "E t*3 | t m*2 L"}, {.mtp = 2}},
    {"pp2_vpp2_dp2_latent_mtp", 4, {.pp = 2, .vpp = 2}, {.mtp = 1, .latent = true}},
    {"tp2_cp2_ep4_pp2", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}},
    {"pp2_frozen_stage", 2, {.pp = 2}, {.freeze = kStage}},
    {"tp2_ep2_lora", 2, {.tp = 2, .ep = 2}, {.lora = true}},
};

INSTANTIATE_TEST_SUITE_P(Everywhere, Offload, ::testing::ValuesIn(kOffloadCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

const LayoutCase kRecomputeCases[] = {
    {"tp2_ep2_alltoall", 2, {.tp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall}},
    {"cp2_ring_capacity", 2, {.cp = 2, .cp_comm = CpComm::ring}, {.capacity = true}},
    {"cp2_alltoall_ep4_mtp", 4, {.cp = 2, .ep = 4, .cp_comm = CpComm::alltoall}, {.mtp = 1}},
    {"tp2_ep2_etp2_gpt_oss", 4, {.tp = 2, .ep = 2, .etp = 2}, {.gpt_oss = true}},
    {"pp2_vpp2_ep2", 4, {.pp = 2, .vpp = 2, .ep = 2}},
    {"tp2_ep2_lora", 2, {.tp = 2, .ep = 2}, {.lora = true}},
};

INSTANTIATE_TEST_SUITE_P(Everywhere, Recompute, ::testing::ValuesIn(kRecomputeCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

// The order of sums does not depend on when gradients of weights are computed, also where the loss and modules of
// multi-token prediction add to one embedding.
TEST(PipelineSchedules, ChangeNoBit) {
  const ParallelSpec plain{.pp = 2}, split{.pp = 2, .schedule = PipelineSchedule::zb_h1};
  for (const LayoutModel& model : {LayoutModel{.tied = true, .mtp = 1}, LayoutModel{.gpt_oss = true}}) {
    run_ranks(2, [&](Transport& world) {
      expect_same_bits(train_briefly(world, model, split), train_briefly(world, model, plain));
    });
  }
}

}  // namespace
}  // namespace moebius
