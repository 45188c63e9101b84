// log.precision counts each element of an operand once, whatever ranks quantise it and wherever its row arrives.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "config/dispatcher_choice.h"
#include "model/moe/moe_testing.h"

namespace moebius {
namespace {

using testing::MoeCase;

struct CountedLayer {
  const char* name;
  MeshShape mesh;
  PrecisionRecipe recipe;
  PrecisionChoice dispatch = PrecisionChoice::compute;
};
void PrintTo(const CountedLayer& c, std::ostream* out) { *out << c.name; }

constexpr auto kBlock = PrecisionRecipe::fp8_block, kTensor = PrecisionRecipe::fp8_tensor, kMx = PrecisionRecipe::mxfp8,
               kNv = PrecisionRecipe::nvfp4;
const CountedLayer kLayers[] = {
    {"nvfp4_ep2", {.dp = 2, .ep = 2}, kNv},
    {"nvfp4_ep2_edp2", {.dp = 4, .ep = 2, .edp = 2}, kNv},
    {"nvfp4_etp2_ep2", {.dp = 4, .etp = 2, .ep = 2}, kNv},
    {"nvfp4_tp2_ep2", {.tp = 2, .ep = 2}, kNv},
    {"nvfp4_tp2dp2_ep4", {.tp = 2, .dp = 2, .ep = 4}, kNv},
    {"mxfp8_ep2", {.dp = 2, .ep = 2}, kMx},
    {"mxfp8_tp2_etp2", {.tp = 2, .etp = 2}, kMx},
    {"fp8_tensor_tp2_ep2", {.tp = 2, .ep = 2}, kTensor},
    {"fp8_block_ep2", {.dp = 2, .ep = 2}, kBlock},
    {"fp8_block_etp2_ep2", {.dp = 4, .etp = 2, .ep = 2}, kBlock},
    {"fp8_block_ep2_in_8_bits", {.dp = 2, .ep = 2}, kBlock, PrecisionChoice::recipe},
};

MoeCase counted(const CountedLayer& layer, DispatcherKind dispatcher) {
  PrecisionSpec precision{.recipe = layer.recipe};
  precision.dispatch = layer.dispatch;
  // Blocks of dW may have rows of other tokens on a layout, but not those of nvfp4.
  if (layer.recipe == kMx || layer.recipe == kBlock) precision.weight_gradients = WeightGradientPrecision::compute;
  return {.mesh = layer.mesh,
          .dispatcher = dispatcher,
          .batch = 4,
          .shared = true,
          .precision = precision,
          .hidden = 256,
          .counts = true};
}

// Adds the sums of a rank, as the metrics of a run do.
void add_sums(std::vector<double>& all, const std::vector<double>& of_rank) {
  if (all.empty()) all.assign(5, 0.0);
  for (size_t i = 0; i < 3; ++i) all[i] += of_rank[i];
  if (of_rank[3] > 0) all[3] = all[3] == 0 ? of_rank[3] : std::min(all[3], of_rank[3]);
  all[4] = std::max(all[4], of_rank[4]);
}

class QuantizeStatsOfRanks : public ::testing::TestWithParam<std::tuple<CountedLayer, DispatcherKind>> {};

// The numbers are those of one rank up to the last bit. So at most a few of them become zero on one side alone, or are
// saturated there.
TEST_P(QuantizeStatsOfRanks, AreThoseOfOneRank) {
  const auto& [layer, dispatcher] = GetParam();
  const MoeCase c = counted(layer, dispatcher);
  const testing::Outcome alone = testing::on_one_rank(c);
  for (const char* step : {"step 1 sums", "step 2 sums"}) {
    SCOPED_TRACE(step);
    std::vector<double> got;
    testing::on_ranks(c, [&](const testing::Outcome& of_rank, int) { add_sums(got, of_rank.at(step)); });
    const std::vector<double>& want = alone.at(step);
    EXPECT_EQ(got[0], want[0]) << "elements";
    EXPECT_NEAR(got[1], want[1], 3) << "saturated";
    EXPECT_NEAR(got[2], want[2], 3) << "zeroed";
    EXPECT_NEAR(got[3] / want[3], 1, 1e-5) << "smallest scale";
    EXPECT_NEAR(got[4] / want[4], 1, 1e-5) << "largest scale";
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, QuantizeStatsOfRanks,
                         ::testing::Combine(::testing::ValuesIn(kLayers),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         [](const auto& info) {
                           return fmt::format("{}_{}", std::get<0>(info.param).name, name_of(std::get<1>(info.param)));
                         });

// Recomputing h counts nothing once more. nvfp4 has numbers of each kind to compare.
TEST(QuantizeStatsOfRanks, RecomputeCountsNothingTwice) {
  for (const PrecisionRecipe recipe : {kNv, kMx, kTensor, kBlock}) {
    SCOPED_TRACE(name_of(recipe));
    MoeCase c = counted({"", {.dp = 2, .ep = 2}, recipe}, DispatcherKind::alltoall);
    if (recipe == kTensor) c.mesh = {.tp = 2, .ep = 2};
    MoeCase recomputed = c, budget = c;
    recomputed.recompute.expert_up = recomputed.recompute.shared_expert = true;
    budget.expert_rows = 0.5;
    const std::vector<double> want = testing::on_one_rank(c).at("step 1 sums");
    if (recipe == kNv) {
      EXPECT_GT(want[1], 10);
      EXPECT_GT(want[2], 10);
    }
    EXPECT_EQ(testing::on_one_rank(recomputed).at("step 1 sums"), want);
    std::vector<double> sums, of_recomputed, of_budget;
    testing::on_ranks(c, [&](const auto& of_rank, int) { add_sums(sums, of_rank.at("step 1 sums")); });
    testing::on_ranks(recomputed,
                      [&](const auto& of_rank, int) { add_sums(of_recomputed, of_rank.at("step 1 sums")); });
    testing::on_ranks(budget, [&](const auto& of_rank, int) { add_sums(of_budget, of_rank.at("step 1 sums")); });
    EXPECT_EQ(of_recomputed, sums);
    EXPECT_EQ(of_budget, sums);
  }
}

}  // namespace
}  // namespace moebius
