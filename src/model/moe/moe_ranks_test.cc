#include <gmock/gmock.h>

#include <cmath>

#include "config/dispatcher_choice.h"
#include "io/testing.h"
#include "model/moe/moe_testing.h"

namespace moebius {
namespace {

using testing::MoeCase;
using testing::MoeRank;
using testing::Outcome;

// Distance of a rank's values from those that one rank computes, relative to the largest element.
double distance(const std::vector<double>& got, const std::vector<double>& want) {
  double largest = 1e-30, worst = 0;
  for (const double x : want) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != MoeRank::kAbsent) worst = std::max(worst, std::abs(got[i] - want[i]));
  }
  return worst / largest;
}

// of_shared: for gradients of weights of the shared MLP; without it they have the same tolerance.
void expect_same(const MoeCase& c, double tolerance, double of_shared = 0) {
  const Outcome want = testing::on_one_rank(c);
  std::map<std::string, std::vector<bool>> seen;
  testing::on_ranks(c, [&](const Outcome& got, int) {
    for (const auto& [name, values] : got) {
      ASSERT_TRUE(want.contains(name)) << name;
      ASSERT_EQ(values.size(), want.at(name).size()) << name;
      const bool is_shared = name.find("grad mlp.shared_experts.") != std::string::npos;
      EXPECT_LE(distance(values, want.at(name)), is_shared ? std::max(tolerance, of_shared) : tolerance) << name;
      std::vector<bool>& here = seen[name];
      here.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i)
        if (values[i] != MoeRank::kAbsent) here[i] = true;
    }
  });
  for (const auto& [name, values] : want) EXPECT_EQ(seen[name], std::vector<bool>(values.size(), true)) << name;
}

struct Layout {
  const char* name;
  MeshShape mesh;
};
const std::vector<Layout> kLayouts = {
    {"ep1_dp2", {.dp = 2, .edp = 2}},
    {"ep2", {.dp = 2, .ep = 2}},
    {"ep4", {.dp = 4, .ep = 4}},
    {"etp2", {.dp = 2, .etp = 2}},
    {"etp2ep2", {.dp = 4, .etp = 2, .ep = 2}},
    {"ep2_edp2", {.dp = 4, .ep = 2, .edp = 2}},
    {"tp2_ep2", {.tp = 2, .ep = 2}},
    {"tp2_etp2", {.tp = 2, .etp = 2}},
    {"cp2_ep2", {.cp = 2, .ep = 2}},
    {"tp2cp2dp2_ep4", {.tp = 2, .cp = 2, .dp = 2, .ep = 4, .edp = 2}},
    {"tp2cp2dp2_ep8", {.tp = 2, .cp = 2, .dp = 2, .ep = 8}},
    {"tp2dp2_etp2ep2", {.tp = 2, .dp = 2, .etp = 2, .ep = 2}},
};

class MoeRanks : public ::testing::TestWithParam<std::tuple<size_t, DispatcherKind>> {
 protected:
  MoeCase c() const {
    const auto& [layout, dispatcher] = GetParam();
    return {.mesh = kLayouts[layout].mesh, .dispatcher = dispatcher};
  }
};

TEST_P(MoeRanks, EqualOneRank) { expect_same(c(), 2e-6); }

// With an A for each projection, and with one for gate and up together.
TEST_P(MoeRanks, WithAdaptersEqualOneRank) {
  const std::vector<std::string> own{"mlp.experts.*"}, shared{"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
  for (const std::vector<std::string>& targets : {own, shared}) {
    SCOPED_TRACE(targets.front());
    MoeCase adapted = c();
    adapted.lora = {.rank = 3, .targets = targets};
    expect_same(adapted, 4e-6);  // the sums of adapters are added to those of the layer
  }
}

std::string name_of_case(const ::testing::TestParamInfo<MoeRanks::ParamType>& info) {
  return std::string(kLayouts[std::get<0>(info.param)].name) + "_" + name_of(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Layouts, MoeRanks,
                         ::testing::Combine(::testing::Range<size_t>(0, kLayouts.size()),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         name_of_case);

// Every rank's blocks are those of a single rank, so that only the order of sums differs: quantised
// operands of other bits would be off by far more. The weight gradients of experts and of the shared
// MLP are sums over the same rows in the same order, and have the same bits.
//
// There is one exception. With cp a rank has some of the tokens, so the blocks of dW of the shared MLP consist of other
// tokens. (An expert has fewer than 128 rows here, which are one block in each layout.) Scales are powers of two, so
// another scale changes only values that are below the normal range of E4M3 with one of both: by at most 2^-9 of the
// larger scale, which is about 2^-17 of the largest value of that block. With fp8_block x has such values, since
// 128 columns share a scale.
struct QuantisedLayout {
  const char* name;
  MeshShape mesh;
  bool same_order = true;  // of the rows of an expert
  static constexpr double kTolerance = 2e-6;
  double of_shared(PrecisionRecipe recipe) const {
    return !same_order && recipe == PrecisionRecipe::fp8_block ? 0x1p-16 : kTolerance;
  }
};
const std::vector<QuantisedLayout> kQuantisedLayouts = {
    {"tp2_ep2", {.tp = 2, .ep = 2}},
    {"tp2_etp2", {.tp = 2, .etp = 2}},
    {"cp2_ep2", {.cp = 2, .ep = 2}, false},
    {"tp2cp2_ep4", {.tp = 2, .cp = 2, .ep = 4}, false},
};

class QuantisedMoeRanks : public ::testing::TestWithParam<std::tuple<size_t, PrecisionRecipe, DispatcherKind>> {};

TEST_P(QuantisedMoeRanks, EqualOneRank) {
  const auto& [index, recipe, dispatcher] = GetParam();
  const QuantisedLayout& layout = kQuantisedLayouts[index];
  const MoeCase c{.mesh = layout.mesh,
                  .dispatcher = dispatcher,
                  .shared = true,
                  .shared_gate = false,
                  .precision = {.recipe = recipe},
                  .hidden = 256};
  expect_same(c, QuantisedLayout::kTolerance, layout.of_shared(recipe));
  if (!layout.same_order) return;
  const Outcome want = testing::on_one_rank(c);
  testing::on_ranks(c, [&](const Outcome& got, int) {
    for (const auto& [name, values] : got) {
      if (name.find("experts.") == std::string::npos) continue;
      EXPECT_EQ(distance(values, want.at(name)), 0) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, QuantisedMoeRanks,
                         ::testing::Combine(::testing::Range<size_t>(0, kQuantisedLayouts.size()),
                                            ::testing::Values(PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor,
                                                              PrecisionRecipe::mxfp8),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall)),
                         [](const auto& info) {
                           const bool gathers = std::get<2>(info.param) == DispatcherKind::allgather;
                           return fmt::format("{}_{}_{}", kQuantisedLayouts[std::get<0>(info.param)].name,
                                              name_of(std::get<1>(info.param)), gathers ? "allgather" : "alltoall");
                         });

// Pre-activations are saved in 8 bits.
const PrecisionSpec kSavedInEightBits = {.recipe = PrecisionRecipe::fp8_block, .activations = PrecisionChoice::recipe};

class MoeSavedInEightBits : public ::testing::TestWithParam<std::tuple<size_t, DispatcherKind>> {
 protected:
  MoeCase c() const {
    const auto& [index, dispatcher] = GetParam();
    return {.mesh = kQuantisedLayouts[index].mesh,
            .dispatcher = dispatcher,
            .dtype = DType::bf16,
            .seq = 40,
            .shared = true,
            .gate_std = 8,
            .precision = kSavedInEightBits,
            .hidden = 256};
  }
};

TEST_P(MoeSavedInEightBits, EqualsOneRank) {
  MoeCase in_f32 = c();
  in_f32.dtype = DType::f32;
  in_f32.seq = 8;
  in_f32.shared_gate = false;
  in_f32.gate_std = 0.5;
  expect_same(in_f32, QuantisedLayout::kTolerance,
              kQuantisedLayouts[std::get<0>(GetParam())].of_shared(PrecisionRecipe::fp8_block));
  const Outcome rounded = testing::on_one_rank(in_f32);
  in_f32.precision.activations = PrecisionChoice::compute;
  const Outcome plain = testing::on_one_rank(in_f32);
  EXPECT_EQ(rounded.at("step 1 y"), plain.at("step 1 y")) << "forward computes with numbers that are not rounded";
  EXPECT_NE(rounded.at("step 1 dx"), plain.at("step 1 dx"));
  EXPECT_LT(distance(rounded.at("step 1 dx"), plain.at("step 1 dx")), 0.1);
}

// Rows are rounded, whatever their source: kept, recomputed, in pages of a budget, and beyond them.
TEST_P(MoeSavedInEightBits, RoundsKeptRecomputedAndSpilledRowsTheSameWay) {
  const auto run = [](const MoeCase& c) {
    std::map<int, Outcome> all;
    testing::on_moe_ranks(c, [&](const MoeRank& rank, int number) { all[number] = rank.outcome(); });
    return all;
  };
  for (const WeightGradientPrecision of_dw : {WeightGradientPrecision::recipe, WeightGradientPrecision::compute}) {
    MoeCase way = c();
    way.precision.weight_gradients = of_dw;
    const auto want = run(way);
    way.recompute.expert_up = way.recompute.shared_expert = true;
    EXPECT_EQ(run(way), want);
    way.expert_rows = 0.5;
    EXPECT_EQ(run(way), want);
    way.recompute = {};
    for (const double budget : {1.25, 0.5, 1e-9}) {
      way.expert_rows = budget;
      EXPECT_EQ(run(way), want) << "budget " << budget;
    }
    way.expert_rows = 0;
    way.overlap = ExpertOverlap::layer;
    EXPECT_EQ(run(way), want);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, MoeSavedInEightBits,
                         ::testing::Combine(::testing::Range<size_t>(0, kQuantisedLayouts.size()),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         [](const auto& info) {
                           return fmt::format("{}_{}", kQuantisedLayouts[std::get<0>(info.param)].name,
                                              name_of(std::get<1>(info.param)));
                         });

// Rows are sent in 8 bits, and no product is quantised.
const PrecisionSpec kInEightBits = {
    .recipe = PrecisionRecipe::fp8_block, .dispatch = PrecisionChoice::recipe, .keep = {"*"}};

class MoeRowsInEightBits : public MoeRanks {};

// A token is rounded by itself, on one rank too, so that the values that arrive are the same.
TEST_P(MoeRowsInEightBits, EqualOneRank) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    MoeCase narrow = c();
    narrow.dtype = dtype;
    narrow.precision = kInEightBits;
    expect_same(narrow, dtype == DType::f32 ? 2e-6 : 0.02);
  }
}

TEST_P(MoeRowsInEightBits, AreRoundedAndSmaller) {
  const auto sent_and_outcome = [&](const PrecisionSpec& precision) {
    MoeCase wide = c();
    wide.precision = precision;
    int64_t sent = 0;
    Outcome y;
    testing::on_moe_ranks(wide, [&](const MoeRank& rank, int) {
      sent += rank.sent_to_experts();
      y = rank.outcome();
    });
    return std::pair{sent, y};
  };
  const auto [wide, y] = sent_and_outcome({});
  const auto [narrow, rounded] = sent_and_outcome(kInEightBits);
  EXPECT_NE(y, rounded);
  if (c().mesh.ep * c().mesh.etp > 1) {
    EXPECT_LT(narrow, wide);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, MoeRowsInEightBits,
                         ::testing::Combine(::testing::Values<size_t>(0, 2, 4, 9, 11),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         name_of_case);

std::string construction_error(const MoeCase& c) {
  try {
    testing::on_ranks(c, [](const Outcome&, int) {});
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(QuantisedMoe, BlocksAreNotSplitOverRanks) {
  const MeshShape etp2{.tp = 2, .etp = 2};
  EXPECT_THAT(
      construction_error({.mesh = etp2, .precision = {.recipe = PrecisionRecipe::fp8_block}, .hidden = 128}),
      ::testing::HasSubstr("precision.recipe = \"fp8_block\" has blocks of 128 that ranks cannot share: the 128 "
                           "rows of mlp.experts.0.gate_proj.weight are split into 64; choose a smaller "
                           "parallel.tp or etp, or add the name to precision.keep"));
  EXPECT_EQ(
      construction_error(
          {.mesh = etp2, .precision = {.recipe = PrecisionRecipe::fp8_block, .keep = {"*.experts.*"}}, .hidden = 128}),
      "no error");
}

// The gate or the up projection cannot be kept without the other, since they are one product.
TEST(QuantisedMoe, GateAndUpAreKeptTogether) {
  EXPECT_THAT(
      construction_error({.precision = {.recipe = PrecisionRecipe::fp8_block, .keep = {"*.gate_proj.weight"}}}),
      ::testing::HasSubstr("precision.keep: expected patterns that match all parts of mlp.experts.gate_up_proj"));
}

// Returns the outcomes of the ranks of a case.
std::map<int, Outcome> outcomes(MoeCase c, DispatcherKind dispatcher) {
  c.dispatcher = dispatcher;
  std::map<int, Outcome> all;
  testing::on_ranks(c, [&](const Outcome& got, int rank) { all[rank] = got; });
  return all;
}

class DirectMoe : public ::testing::TestWithParam<size_t> {};

// The direct dispatcher sorts and adds as all-gather does; only the way in which rows are sent differs.
TEST_P(DirectMoe, HasTheBitsOfAllGather) {
  const MeshShape mesh = kLayouts[GetParam()].mesh;
  for (const MoeCase& c : std::vector<MoeCase>{{.mesh = mesh},
                                               {.mesh = mesh, .dtype = DType::bf16, .shared = true},
                                               {.mesh = mesh, .dtype = DType::bf16, .gate_std = 8},
                                               {.mesh = mesh, .balance = {.capacity_factor = 0.6}, .gate_std = 8}})
    EXPECT_EQ(outcomes(c, DispatcherKind::direct), outcomes(c, DispatcherKind::allgather));
}

INSTANTIATE_TEST_SUITE_P(Layouts, DirectMoe, ::testing::Range<size_t>(0, kLayouts.size()),
                         [](const auto& info) { return std::string(kLayouts[info.param].name); });

// Blocks of ranks of one machine stand for nodes: of one, two, four and eight ranks; of whole ep ranks with etp; in
// one of two copies of the experts; and so many that their sums have two levels.
const std::vector<Layout> kNodeLayouts = {
    {"ep4_nodes_of_2", {.dp = 4, .ep = 4, .ranks_per_node = 2}},
    {"ep4_nodes_of_1", {.dp = 4, .ep = 4, .ranks_per_node = 1}},
    {"ep4_edp2_nodes_of_2", {.dp = 8, .ep = 4, .edp = 2, .ranks_per_node = 2}},
    {"tp2cp2_ep4_nodes_of_2", {.tp = 2, .cp = 2, .ep = 4, .ranks_per_node = 2}},
    {"tp2cp2dp2_ep8_nodes_of_2", {.tp = 2, .cp = 2, .dp = 2, .ep = 8, .ranks_per_node = 2}},
    {"etp2ep4_nodes_of_4", {.dp = 8, .etp = 2, .ep = 4, .ranks_per_node = 4}},
    {"etp2ep8_nodes_of_8", {.dp = 16, .etp = 2, .ep = 8}},
    {"etp2ep12_twelve_nodes_of_2", {.dp = 24, .etp = 2, .ep = 12, .ranks_per_node = 2}},
};

class TwoLevelMoe : public ::testing::TestWithParam<size_t> {
 protected:
  MeshShape mesh() const { return kNodeLayouts[GetParam()].mesh; }
  int64_t num_experts() const { return std::max<int64_t>(8, mesh().ep); }
};

TEST_P(TwoLevelMoe, EqualsOneRank) {
  expect_same({.mesh = mesh(), .dispatcher = DispatcherKind::two_level, .num_experts = num_experts()}, 2e-6);
}

// Sums of nodes equal those of all-gather at its first level. A gate of 200 leaves ranks and nodes without tokens.
TEST_P(TwoLevelMoe, HasTheBitsOfAllGather) {
  RecomputeSpec recomputed;
  recomputed.expert_up = recomputed.shared_expert = true;
  const LoraSpec lora{.rank = 3, .dropout = 0.3, .targets = {"mlp.experts.*"}};
  for (MoeCase c : std::vector<MoeCase>{{},
                                        {.dtype = DType::bf16, .shared = true},
                                        {.dtype = DType::bf16, .gate_std = 8},
                                        {.dtype = DType::bf16, .gate_std = 200},
                                        {.balance = {.capacity_factor = 0.6}, .gate_std = 8},
                                        {.dtype = DType::bf16, .precision = kInEightBits},
                                        {.gate_std = 8, .recompute = recomputed},
                                        {.dtype = DType::bf16, .shared = true, .overlap = ExpertOverlap::layer},
                                        {.seq = 40, .gate_std = 8, .expert_rows = 1e-9},
                                        {.dtype = DType::bf16, .seq = 40, .expert_rows = 0.5},
                                        {.lora = lora}}) {
    c.mesh = mesh();
    c.num_experts = num_experts();
    EXPECT_EQ(outcomes(c, DispatcherKind::two_level), outcomes(c, DispatcherKind::allgather))
        << "gate " << c.gate_std << " budget " << c.expert_rows;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, TwoLevelMoe, ::testing::Range<size_t>(0, kNodeLayouts.size()),
                         [](const auto& info) { return std::string(kNodeLayouts[info.param].name); });

// A budget of rows changes no bit, whatever fits it: all rows, some, or a page at most; skewed gates give some ranks
// most rows and others none.
class BudgetedMoe : public ::testing::TestWithParam<std::tuple<size_t, DispatcherKind>> {
 protected:
  // Outcomes by rank, and the rows that were recomputed.
  static std::pair<std::map<int, Outcome>, double> run(const MoeCase& c) {
    std::map<int, Outcome> all;
    double spilled = 0;
    testing::on_moe_ranks(c, [&](const MoeRank& rank, int number) {
      all[number] = rank.outcome();
      spilled = rank.spilled_rows();
    });
    return {all, spilled};
  }
};

TEST_P(BudgetedMoe, HasTheBitsOfTheWorstCase) {
  const auto& [layout, dispatcher] = GetParam();
  const MeshShape mesh = kLayouts[layout].mesh;
  const LoraSpec lora{.rank = 3, .targets = {"mlp.experts.*"}};
  LoraSpec with_dropout = lora;  // the indices of tokens are sent too
  with_dropout.dropout = 0.3;
  for (MoeCase c : std::vector<MoeCase>{
           {.seq = 40},
           {.dtype = DType::bf16, .seq = 40, .shared = true, .gate_std = 8},
           {.dtype = DType::bf16, .seq = 40, .gate_std = 200},
           {.balance = {.capacity_factor = 0.6}, .seq = 40, .gate_std = 8},
           {.seq = 40, .gate_std = 8, .recompute = {.expert_up = true}},
           {.seq = 40, .gate_std = 8, .lora = lora},
           {.seq = 40, .gate_std = 8, .lora = with_dropout},
           {.dtype = DType::bf16, .seq = 40, .lora = with_dropout},
       }) {
    c.mesh = mesh;
    c.dispatcher = dispatcher;
    const auto want = run(c).first;
    for (const double budget : {1.25, 0.5, 1e-9}) {
      c.expert_rows = budget;
      const auto [got, spilled] = run(c);
      EXPECT_EQ(got, want) << "budget " << budget << " gate " << c.gate_std;
      if (budget == 1e-9 && mesh.ep > 1 && mesh.cp == 1 && !c.recompute.expert_up && c.gate_std > 1) {
        EXPECT_GT(spilled, 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, BudgetedMoe,
                         ::testing::Combine(::testing::Values<size_t>(1, 2, 3, 4, 9),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         name_of_case);

class OverlappingMoe : public ::testing::TestWithParam<std::tuple<size_t, DispatcherKind>> {};

// Rows are exchanged at other times, and the gradients of weights are computed before those of the router.
TEST_P(OverlappingMoe, ChangesNoBit) {
  const auto& [layout, dispatcher] = GetParam();
  const MeshShape mesh = kLayouts[layout].mesh;
  RecomputeSpec recomputed;
  recomputed.expert_up = recomputed.shared_expert = true;
  for (MoeCase c : std::vector<MoeCase>{{.mesh = mesh},
                                        {.mesh = mesh, .dtype = DType::bf16, .shared = true},
                                        {.mesh = mesh, .dtype = DType::bf16, .shared = true, .shared_gate = false},
                                        {.mesh = mesh, .shared = true, .recompute = recomputed},
                                        {.mesh = mesh, .balance = {.capacity_factor = 0.6}, .gate_std = 8}}) {
    const auto alone = outcomes(c, dispatcher);
    c.overlap = ExpertOverlap::layer;
    EXPECT_EQ(outcomes(c, dispatcher), alone);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, OverlappingMoe,
                         ::testing::Combine(::testing::Range<size_t>(0, kLayouts.size()),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         [](const auto& info) {
                           return fmt::format("{}_{}", kLayouts[std::get<0>(info.param)].name,
                                              name_of(std::get<1>(info.param)));
                         });

// The balances in which a router uses more than its own tokens. The layouts spread a micro-batch over
// several ranks.
struct Balance {
  const char* name;
  BalanceSpec spec;
};
const std::vector<Balance> kBalances = {
    {"aux", {.aux = true, .aux_coeff = 0.1, .z_coeff = 0.01}},
    {"seq_aux", {.seq_aux = true, .aux_coeff = 0.1}},
    {"global_aux", {.global_aux = true, .aux_coeff = 0.1}},
    {"all_aux", {.aux = true, .seq_aux = true, .global_aux = true, .aux_coeff = 0.1, .z_coeff = 0.01}},
    {"bias", {.bias = true, .bias_rate = 0.05}},
    {"capacity_probs", {.aux = true, .aux_coeff = 0.1, .capacity_factor = 0.8}},
    {"capacity_position", {.capacity_factor = 0.6, .drop_policy = DropPolicy::position}},
    {"sinkhorn", {.sinkhorn = true}},
    {"sinkhorn_capacity", {.sinkhorn = true, .capacity_factor = 1.0}},
    {"forced", {.force_balance = true}},
    {"jitter", {.jitter = 0.2}},
};
const std::vector<Layout> kBatchLayouts = {
    {"tp2", {.tp = 2, .ep = 2}},
    {"cp2", {.cp = 2, .ep = 2}},
    {"tp2cp2", {.tp = 2, .cp = 2, .ep = 4}},
    {"tp2dp2", {.tp = 2, .dp = 2, .etp = 2, .ep = 2}},
};

class MoeBalances : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {};

TEST_P(MoeBalances, AreThoseOfOneRank) {
  const auto& [layout, balance] = GetParam();
  const MeshShape mesh = kBatchLayouts[layout].mesh;
  const auto dispatcher = mesh.ep == 4 ? DispatcherKind::alltoall : DispatcherKind::allgather;
  expect_same({.mesh = mesh, .dispatcher = dispatcher, .balance = kBalances[balance].spec}, 2e-6);
}

INSTANTIATE_TEST_SUITE_P(Layouts, MoeBalances,
                         ::testing::Combine(::testing::Range<size_t>(0, kBatchLayouts.size()),
                                            ::testing::Range<size_t>(0, kBalances.size())),
                         [](const auto& info) {
                           return fmt::format("{}_{}", kBatchLayouts[std::get<0>(info.param)].name,
                                              kBalances[std::get<1>(info.param)].name);
                         });

}  // namespace
}  // namespace moebius
