// parallel.expert_overlap = "batch_split": the layer has the bits that it has without overlap.
#include <gmock/gmock.h>

#include "config/testing.h"
#include "model/moe/moe_testing.h"

namespace moebius {
namespace {

using testing::MoeCase;
using testing::Outcome;

struct SplitLayout {
  const char* name;
  MeshShape mesh;
};
const std::vector<SplitLayout> kSplitLayouts = {
    {"ep2", {.dp = 2, .ep = 2}},
    {"ep4", {.dp = 4, .ep = 4}},
    {"etp5", {.dp = 5, .etp = 5}},
    {"etp2ep4", {.dp = 8, .etp = 2, .ep = 4}},
    {"ep8", {.dp = 8, .ep = 8}},
    {"etp2", {.dp = 2, .etp = 2}},
    {"etp2ep2", {.dp = 4, .etp = 2, .ep = 2}},
    {"ep2edp2", {.dp = 4, .ep = 2, .edp = 2}},
    {"tp2ep4", {.tp = 2, .dp = 2, .ep = 4}},
    {"cp2ep2", {.cp = 2, .ep = 2}},
};

// Returns the outcomes by rank.
std::map<int, Outcome> outcomes(const MoeCase& c) {
  std::map<int, Outcome> all;
  testing::on_ranks(c, [&](const Outcome& got, int number) { all[number] = got; });
  return all;
}

// Rows are computed in parts, by the distance of the rank that they come from. A gate of 200 leaves ranks without rows.
class BatchSplitMoe : public ::testing::TestWithParam<size_t> {};

TEST_P(BatchSplitMoe, ChangesNoBit) {
  const MeshShape mesh = kSplitLayouts[GetParam()].mesh;
  RecomputeSpec recomputed;
  recomputed.expert_up = recomputed.shared_expert = true;
  for (MoeCase c : std::vector<MoeCase>{{},
                                        {.dtype = DType::bf16, .seq = 40, .shared = true},
                                        {.dtype = DType::bf16, .seq = 40, .gate_std = 8},
                                        {.dtype = DType::bf16, .gate_std = 200},
                                        {.shared = true, .recompute = recomputed},
                                        {.balance = {.capacity_factor = 0.6}, .gate_std = 8},
                                        {.seq = 40, .gate_std = 8, .expert_chunk = 4},
                                        {.dtype = DType::bf16, .splits_backward = true},
                                        {.first_of_step = true}}) {
    c.mesh = mesh;
    c.dispatcher = DispatcherKind::direct;
    const auto alone = outcomes(c);
    c.overlap = ExpertOverlap::batch_split;
    EXPECT_EQ(outcomes(c), alone) << "gate " << c.gate_std;
    if (c.expert_chunk > 0) continue;
    for (const double budget : {1.25, 0.5, 1e-9}) {
      c.expert_rows = budget;
      EXPECT_EQ(outcomes(c), alone) << "gate " << c.gate_std << " budget " << budget;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, BatchSplitMoe, ::testing::Range<size_t>(0, kSplitLayouts.size()),
                         [](const auto& info) { return std::string(kSplitLayouts[info.param].name); });

TEST(BatchSplitMoe, RefusesWhatItCannotSplit) {
  const auto error_of = [](MoeCase c) {
    c.mesh = {.dp = 2, .ep = 2};
    c.overlap = ExpertOverlap::batch_split;
    return error_text(ErrorKind::usage, [&] { outcomes(c); });
  };
  EXPECT_THAT(error_of({.dispatcher = DispatcherKind::allgather}),
              ::testing::HasSubstr("parallel.expert_overlap = \"batch_split\" needs parallel.dispatcher = \"direct\""));
  for (const MoeCase& c : std::vector<MoeCase>{
           {.precision = {.recipe = PrecisionRecipe::fp8_block}, .hidden = 256},
           {.precision = {.recipe = PrecisionRecipe::fp8_block, .dispatch = PrecisionChoice::recipe, .keep = {"*"}}},
           {.lora = {.rank = 3, .targets = {"mlp.experts.*"}}}}) {
    MoeCase direct = c;
    direct.dispatcher = DispatcherKind::direct;
    EXPECT_THAT(error_of(direct), ::testing::HasSubstr("rows and products must be bf16 or f32, without adapters"));
  }
}

}  // namespace
}  // namespace moebius
