// Steps of an MoE layer with each dispatcher, over threads and over processes: forward and backward passes, with skewed
// routes, ranks without a row, overlap, and rows that do not fit a budget. Each rank computes with two threads. The
// preset tsan runs these tests, so that the thread sanitizer sees the accesses of the ranks to each other's windows.
#include "config/dispatcher_choice.h"
#include "model/moe/dispatchers/dispatcher_testing.h"
#include "model/moe/moe_testing.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

using testing::MoeCase;
using testing::MoeRank;
using testing::Outcome;

Outcome outcome_of(const MoeCase& c, Transport& transport, double* spilled = nullptr) {
  Outcome outcome;
  testing::on_moe_rank(c, transport, [&](const MoeRank& rank) {
    outcome = rank.outcome();
    if (spilled) *spilled = rank.spilled_rows();
  });
  return outcome;
}

// A gate of 8 gives a few experts most rows. One of 200 leaves ranks without any. There is no shared expert: oneDNN
// computes its products, and the thread sanitizer does not see how oneDNN synchronises its threads.
const std::vector<MoeCase> kCases = {
    {.dtype = DType::bf16, .seq = 40, .gate_std = 8},
    {.seq = 40, .gate_std = 200},
    {.balance = {.capacity_factor = 0.6}, .seq = 40, .gate_std = 8, .first_of_step = true},
};

class MoeDispatchers : public Ranks {
 protected:
  // The cases on all ranks, which are two nodes for the two-level dispatcher.
  static std::vector<MoeCase> cases(DispatcherKind dispatcher) {
    const int64_t n = GetParam();
    std::vector<MoeCase> all = kCases;
    for (MoeCase& c : all) {
      c.mesh = {.dp = n, .ep = n};
      if (dispatcher == DispatcherKind::two_level) c.mesh.ranks_per_node = n / 2;
      c.dispatcher = dispatcher;
      c.threads = 2;
    }
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Everywhere, MoeDispatchers, ::testing::Values(2, 4), name_of_ranks);

// These add in the order of all-gather. With nvfp4 the index of each token is sent too.
TEST_P(MoeDispatchers, DirectAndTwoLevelHaveTheBitsOfAllGather) {
  run([](Transport& world) {
    for (const DispatcherKind dispatcher : {DispatcherKind::direct, DispatcherKind::two_level}) {
      std::vector<MoeCase> all = cases(dispatcher);
      all.push_back(all.front());
      all.back().precision.recipe = PrecisionRecipe::nvfp4;
      all.back().hidden = 32;
      for (MoeCase c : all) {
        const Outcome got = outcome_of(c, world);
        c.dispatcher = DispatcherKind::allgather;
        EXPECT_EQ(got, outcome_of(c, world)) << "gate " << c.gate_std;
      }
    }
  });
}

// Rows that do not fit a budget are computed again in the backward pass, and rows arrive during other work.
TEST_P(MoeDispatchers, OverlapAndBudgetsChangeNoBit) {
  run([](Transport& world) {
    for (const DispatcherKind dispatcher :
         {DispatcherKind::allgather, DispatcherKind::alltoall, DispatcherKind::direct, DispatcherKind::two_level}) {
      for (MoeCase c : cases(dispatcher)) {
        const Outcome want = outcome_of(c, world);
        c.overlap = ExpertOverlap::layer;
        EXPECT_EQ(outcome_of(c, world), want) << "gate " << c.gate_std;
        double spilled = 0;
        c.expert_rows = 1e-9;
        EXPECT_EQ(outcome_of(c, world, &spilled), want) << "gate " << c.gate_std;
        EXPECT_GT(spilled, 0) << name_of(dispatcher) << " gate " << c.gate_std;
        if (dispatcher != DispatcherKind::direct) continue;
        c.overlap = ExpertOverlap::batch_split;
        EXPECT_EQ(outcome_of(c, world), want) << "gate " << c.gate_std;
        c.expert_rows = 0;
        EXPECT_EQ(outcome_of(c, world), want) << "gate " << c.gate_std;
      }
    }
  });
}

// Layers share a window, and their backward passes follow each other. The gradients of weights read the rows of a
// layer after its pass, when other ranks may send those of the next layer.
TEST_P(MoeDispatchers, BackwardPassesFollowEachOther) {
  run([](Transport& world) {
    for (const DispatcherKind dispatcher : {DispatcherKind::direct, DispatcherKind::two_level}) {
      const testing::Case c{
          .mesh = cases(dispatcher).front().mesh, .dispatcher = dispatcher, .T = 11, .E = 8, .K = 2, .D = 6};
      const Mesh mesh(c.mesh, world);
      testing::RankOfCase rank(c, mesh);
      Step& step = rank.step();
      testing::Array x = rank.rows_of_tokens(), dx = x, dweight({c.T, c.K}, DType::f32);
      for (int pass = 0; pass < 20; ++pass) {
        StackScope scope(step.stack);
        const Dispatched rows = rank.dispatcher().dispatch(step, x.tensor(), rank.handle());
        const Dispatched grads = rank.dispatcher().combine_bwd(step, x.tensor(), rank.handle());
        rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(grads),
                                       rank.one_per_row(grads, 1), rank.handle());
        testing::expect_rows(c, dx, rank.first_token(), /*weighted=*/false);
        rank.arrivals(rows, /*weighted=*/false);
        rank.arrivals(grads, /*weighted=*/false);
      }
    }
  });
}

}  // namespace
}  // namespace moebius
