// Experts that process a micro-batch in chunks compute the same results as without chunks.
#include "model/moe/chunked_experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "model/moe/moe_testing.h"

namespace moebius {
namespace {

using testing::MoeCase;
using testing::MoeRank;
using testing::Outcome;

// Elements that a rank has, relative to the largest of the tensor.
void expect_close(const Outcome& got, const Outcome& want, double tolerance) {
  for (const auto& [name, values] : got) {
    const std::vector<double>& expected = want.at(name);
    ASSERT_EQ(values.size(), expected.size()) << name;
    double largest = 1e-30, off = 0;
    for (const double x : expected) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < values.size(); ++i)
      if (values[i] != MoeRank::kAbsent) off = std::max(off, std::abs(values[i] - expected[i]));
    EXPECT_LE(off / largest, tolerance) << name;
  }
}

TEST(ChunkedExperts, ChunksFollowFromTheNumberOfTokens) {
  EXPECT_EQ(expert_chunk(0), 0);
  EXPECT_EQ(expert_chunk(7), 7);
  EXPECT_EQ(expert_chunk(32768), 32768);
  EXPECT_EQ(expert_chunk(131072), 32768);
  EXPECT_EQ(expert_chunk(3 * 20000), 30000);
  EXPECT_EQ(expert_chunk(5 * 9001), 9001);
  EXPECT_EQ(expert_chunk(32771), 32771);  // a prime
}

// All ranks together take 262144 tokens at most, so that no window grows with their number beyond that.
TEST(ChunkedExperts, ChunksOfManyRanksAreShorter) {
  EXPECT_EQ(expert_chunk(131072, 8), 32768);
  EXPECT_EQ(expert_chunk(131072, 16), 16384);
  EXPECT_EQ(expert_chunk(4096, 64), 4096);
  EXPECT_EQ(expert_chunk(4096, 128), 2048);
  EXPECT_EQ(expert_chunk(3 * 1000, 128), 1500);
  EXPECT_EQ(expert_chunk(4099, 128), 4099);  // a prime
  EXPECT_EQ(expert_chunk(0, 128), 0);
  EXPECT_EQ(expert_chunk(3, 1 << 20), 1);
  EXPECT_EQ(expert_chunk(4096, LoraSpec{.rank = 4, .dropout = 0.1}, 128), 4096);
}

// Only the order of the sums of weight gradients differs.
TEST(ChunkedExperts, EqualUnchunkedExperts) {
  BalanceSpec drops;
  drops.capacity_factor = 0.8;
  for (const BalanceSpec& balance : {BalanceSpec{}, drops}) {
    for (const int64_t chunk : {1, 4, 8}) {
      const MoeCase whole{.balance = balance};
      MoeCase chunked = whole;
      chunked.expert_chunk = chunk;
      expect_close(testing::on_one_rank(chunked), testing::on_one_rank(whole), 2e-6);
    }
  }
}

// Also where other passes come between, where the activation is recomputed, and where the first chunk
// stores the gradients that the others add to.
TEST(ChunkedExperts, MemoryChangesNoBit) {
  const MoeCase chunked{.expert_chunk = 4};
  const Outcome want = testing::on_one_rank(chunked);
  MoeCase split = chunked, recomputed = chunked, stored = chunked;
  split.splits_backward = true;
  recomputed.recompute.expert_up = true;
  stored.first_of_step = true;
  for (const MoeCase& c : {split, recomputed, stored}) expect_close(testing::on_one_rank(c), want, 0);
}

// The shared expert computes the same chunks, of its last rows too. With and without a gate.
TEST(ChunkedExperts, WithASharedExpertEqualUnchunked) {
  for (const bool gate : {true, false}) {
    for (const int64_t chunk : {1, 4, 8}) {
      const MoeCase whole{.shared = true, .shared_gate = gate};
      MoeCase chunked = whole;
      chunked.expert_chunk = chunk;
      const Outcome want = testing::on_one_rank(whole), got = testing::on_one_rank(chunked);
      expect_close(got, want, 2e-6);
      for (const auto& [name, values] : got)
        if (name.ends_with(" y") || name.ends_with(" dx")) expect_close({{name, values}}, want, 0);
    }
  }
}

TEST(ChunkedExperts, MemoryChangesNoBitOfASharedExpert) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool gate : {true, false}) {
      const MoeCase chunked{.dtype = dtype, .shared = true, .shared_gate = gate, .expert_chunk = 4};
      const Outcome want = testing::on_one_rank(chunked);
      MoeCase split = chunked, recomputed = chunked, stored = chunked;
      split.splits_backward = true;
      recomputed.recompute.shared_expert = true;
      stored.first_of_step = true;
      MoeCase recomputed_split = recomputed;
      recomputed_split.splits_backward = true;
      for (const MoeCase& c : {split, recomputed, recomputed_split, stored})
        expect_close(testing::on_one_rank(c), want, 0);
    }
  }
}

// With nvfp4 the draws of a token are by its index in the global batch, also in chunks. So equal tokens round in as
// many ways as there are tokens: no two chunks have the same draws, and no two ranks of tp.
TEST(ChunkedExperts, EveryTokenHasItsOwnDraws) {
  for (const MeshShape& mesh : {MeshShape{}, MeshShape{.tp = 2, .edp = 2}, MeshShape{.tp = 2, .ep = 2},
                                MeshShape{.cp = 2, .ep = 2}, MeshShape{.dp = 2, .ep = 2}}) {
    for (const int64_t chunk : {0, 4}) {
      SCOPED_TRACE(fmt::format("tp {}, cp {}, ep {}, chunks of {}", mesh.tp, mesh.cp, mesh.ep, chunk));
      const MoeCase c{.mesh = mesh,
                      .dispatcher = DispatcherKind::alltoall,
                      .precision = {.recipe = PrecisionRecipe::nvfp4},
                      .hidden = 32,
                      .expert_chunk = chunk,
                      .equal_tokens = true};
      std::vector<double> dx;
      testing::on_ranks(c, [&](const Outcome& of_rank, int) {
        const std::vector<double>& here = of_rank.at("step 1 dx");
        if (dx.empty()) dx = here;
        for (size_t i = 0; i < dx.size(); ++i)
          if (here[i] != MoeRank::kAbsent) dx[i] = here[i];
      });
      const size_t columns = 12, tokens = dx.size() / columns;
      std::set<std::vector<double>> rows;
      for (size_t t = 0; t < tokens; ++t) rows.insert({dx.begin() + t * columns, dx.begin() + (t + 1) * columns});
      EXPECT_EQ(rows.size(), tokens);
    }
  }
}

// Chunks of the same tokens have on every layout the numbers of one rank: the scales of a chunk, and the draws.
TEST(ChunkedExperts, OfNvfp4EqualOneRank) {
  for (const DispatcherKind dispatcher :
       {DispatcherKind::allgather, DispatcherKind::alltoall, DispatcherKind::direct}) {
    for (const MeshShape& mesh : {MeshShape{.dp = 2, .ep = 2}, MeshShape{.dp = 2, .etp = 2}}) {
      const MoeCase c{.mesh = mesh,
                      .dispatcher = dispatcher,
                      .shared = true,
                      .precision = {.recipe = PrecisionRecipe::nvfp4},
                      .hidden = 32,
                      .expert_chunk = 4};
      const Outcome want = testing::on_one_rank(c);
      testing::on_ranks(c, [&](const Outcome& got, int) { expect_close(got, want, 2e-6); });
    }
  }
}

TEST(ChunkedExperts, EqualOneRankOnEveryDispatcher) {
  for (const DispatcherKind dispatcher :
       {DispatcherKind::allgather, DispatcherKind::alltoall, DispatcherKind::direct}) {
    for (const MeshShape& mesh : {MeshShape{.dp = 2, .ep = 2}, MeshShape{.dp = 2, .etp = 2}}) {
      const MoeCase c{.mesh = mesh, .dispatcher = dispatcher, .shared = true, .expert_chunk = 4};
      const Outcome want = testing::on_one_rank(c);
      testing::on_ranks(c, [&](const Outcome& got, int) { expect_close(got, want, 2e-6); });
    }
  }
}

}  // namespace
}  // namespace moebius
