// Ranks that share experts have one scale of fp8_tensor for the rows of all their micro-batches, as one rank has for a
// micro-batch that is as large. With nvfp4 each micro-batch has its own.
#include <gtest/gtest.h>

#include "config/dispatcher_choice.h"
#include "io/testing.h"
#include "model/moe/moe_testing.h"

namespace moebius {
namespace {

using testing::MoeCase;
using testing::MoeRank;
using testing::Outcome;

struct SharedScales {
  const char* name;
  MeshShape mesh;
};
void PrintTo(const SharedScales& c, std::ostream* out) { *out << c.name; }

const SharedScales kShared[] = {
    {"ep2", {.dp = 2, .ep = 2}},
    {"etp2ep2", {.dp = 4, .etp = 2, .ep = 2}},
    {"tp2dp2_ep4", {.tp = 2, .dp = 2, .ep = 4}},
    {"cp2dp2_etp2ep2", {.cp = 2, .dp = 2, .etp = 2, .ep = 2}},
};

// Returns what one rank computes from all tokens at once.
Outcome of_one_micro_batch(MoeCase c) {
  c.batch *= c.mesh.dp;
  c.mesh = {};
  return testing::on_one_rank(c);
}

void expect_results(const MoeCase& c, const Outcome& want) {
  testing::on_ranks(c, [&](const Outcome& got, int) {
    for (const auto& [name, values] : got) {
      if (name.find(" y") == std::string::npos && name.find(" dx") == std::string::npos &&
          name.find("experts.") == std::string::npos)
        continue;
      ASSERT_EQ(values.size(), want.at(name).size()) << name;
      double largest = 1e-30, worst = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        largest = std::max(largest, std::abs(want.at(name)[i]));
        if (values[i] != MoeRank::kAbsent) worst = std::max(worst, std::abs(values[i] - want.at(name)[i]));
      }
      EXPECT_LE(worst, 2e-6 * largest) << name;
    }
  });
}

class ScalesOfSharedExperts : public ::testing::TestWithParam<std::tuple<SharedScales, DispatcherKind>> {};

// Sums over ranks have another order, which is some 2^-22 of the largest element. With the scales of one micro-batch
// each, results differ by up to 2^-16 of it: a number below the normal range of the larger scale errs by 2^-18 of the
// largest one.
TEST_P(ScalesOfSharedExperts, AreThoseOfOneMicroBatch) {
  const auto& [layout, dispatcher] = GetParam();
  const MoeCase c{.mesh = layout.mesh,
                  .dispatcher = dispatcher,
                  .precision = {.recipe = PrecisionRecipe::fp8_tensor},
                  .hidden = 32};
  expect_results(c, of_one_micro_batch(c));
}

// With nvfp4 each micro-batch keeps its scale, its blocks and its draws, so results are those of one rank.
TEST_P(ScalesOfSharedExperts, OfMicroBatchesAreThoseOfOneRank) {
  const auto& [layout, dispatcher] = GetParam();
  const MoeCase c{
      .mesh = layout.mesh, .dispatcher = dispatcher, .precision = {.recipe = PrecisionRecipe::nvfp4}, .hidden = 32};
  expect_results(c, testing::on_one_rank(c));
}

INSTANTIATE_TEST_SUITE_P(Layouts, ScalesOfSharedExperts,
                         ::testing::Combine(::testing::ValuesIn(kShared),
                                            ::testing::Values(DispatcherKind::allgather, DispatcherKind::alltoall,
                                                              DispatcherKind::direct)),
                         [](const auto& info) {
                           return fmt::format("{}_{}", std::get<0>(info.param).name, name_of(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace moebius
