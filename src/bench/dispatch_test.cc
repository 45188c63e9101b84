#include "bench/dispatch.h"

#include <cmath>

#include "comm/transport/threads.h"
#include "io/testing.h"

namespace moebius {
namespace {

DispatchBench bench(int ranks, DispatchBenchSpec spec) {
  spec.scale = 1.0 / 16;
  spec.runs = 1;
  DispatchBench first;
  run_threads(ranks, {.timeout_s = 60}, [&](Transport& world) {
    const DispatchBench mine = bench_dispatch(spec, world);
    if (world.rank() == 0) first = mine;
  });
  return first;
}

// 256 tokens per rank, D 32, 16 experts, top 2, bf16. In a balanced route every expert has the same
// number of rows.
TEST(BenchDispatch, AllGatherSendsTheBytesOfTheFormula) {
  for (const auto& [ranks, etp] : {std::pair{2, 1}, {4, 1}, {4, 2}, {2, 2}}) {
    const DispatchBench r = bench(ranks, {.dispatcher = DispatcherKind::allgather, .etp = etp});
    EXPECT_EQ(r.dispatcher, "allgather");
    EXPECT_EQ(r.axis, etp == 1 ? "ep" : "etp_ep");
    const double rows = (ranks - 1) * 256.0 * 32 * 2, weights = (ranks - 1) * 256.0 * 2 * 4;
    const std::vector<double> want = {3 * weights, rows, rows, rows, rows + weights};
    ASSERT_EQ(r.lines.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(r.lines[i].sent_bytes, want[i]) << r.lines[i].name;
      EXPECT_EQ(r.lines[i].expected_bytes, want[i]) << r.lines[i].name;
      EXPECT_GT(r.lines[i].median_ms, 0) << r.lines[i].name;
    }
  }
}

TEST(BenchDispatch, AllToAllSendsTheRowsForOthers) {
  for (const auto& [ranks, etp] : {std::pair{2, 1}, {4, 1}, {4, 2}, {2, 2}}) {
    const DispatchBench r = bench(ranks, {.dispatcher = DispatcherKind::alltoall, .etp = etp});
    const double W = ranks, rows = 256.0 * 2 * etp * (W - 1) / W, bytes = rows * 32 * 2;
    const std::vector<double> want = {(W - 1) * 16 * 4, bytes, bytes, bytes + 4 * rows, bytes + 4 * rows};
    ASSERT_EQ(r.lines.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(r.lines[i].sent_bytes, want[i]) << r.lines[i].name;
    EXPECT_EQ(r.busiest_over_mean, 1);
  }
}

TEST(BenchDispatch, ZipfRoutingRaisesTheLoadOfTheBusiestRank) {
  const DispatchBench r =
      bench(4, {.routing = {.kind = BenchRouting::Kind::zipf}, .dispatcher = DispatcherKind::alltoall});
  EXPECT_GT(r.busiest_over_mean, 1.1);
  EXPECT_EQ(r.lines[1].sent_bytes, r.lines[1].route_bytes);
  EXPECT_NE(r.lines[1].sent_bytes, r.lines[1].expected_bytes);
}

// Each of 512 pairs leaves its rank with probability (W - 1) / W.
TEST(BenchDispatch, RandomRoutesSendTheBytesOfTheFormulaOnAverage) {
  for (const int ranks : {2, 4}) {
    const DispatchBench r = bench(
        ranks, {.routing = {.kind = BenchRouting::Kind::zipf, .exponent = 0}, .dispatcher = DispatcherKind::alltoall});
    const double p = (ranks - 1.0) / ranks, pair_bytes = 32 * 2, sigma = std::sqrt(512 * p * (1 - p)) * pair_bytes;
    EXPECT_EQ(r.lines[1].expected_bytes, 512 * p * pair_bytes);
    EXPECT_NEAR(r.lines[1].sent_bytes, r.lines[1].expected_bytes, 5 * sigma);
    EXPECT_NE(r.busiest_over_mean, 1) << "the route is not an even one";
  }
}

// A token has an expert of a given one of P ranks with probability 1 - C(16 - 16/P, 2) / C(16, 2), and its row then
// is sent once to each of the etp ranks there, unless that is its own.
TEST(BenchDispatch, DirectSendsARowOnceToEachRank) {
  for (const auto& [ranks, etp] : {std::pair{2, 1}, {4, 1}, {4, 2}, {2, 2}}) {
    const DispatchBench r = bench(ranks, {.routing = {.kind = BenchRouting::Kind::zipf, .exponent = 0},
                                          .dispatcher = DispatcherKind::direct,
                                          .etp = etp});
    EXPECT_EQ(r.dispatcher, "direct");
    const double P = ranks / etp, others = 16 - 16 / P, hit = 1 - others * (others - 1) / (16 * 15), W = ranks;
    const double rows = 256 * etp * P * hit * (W - 1) / W, slack = 5 * std::sqrt(256 * P * etp * etp);
    ASSERT_EQ(r.lines.size(), 5u);
    EXPECT_NEAR(r.lines[0].expected_bytes, (W - 1) * P * 4 + rows * 2 * 8, 1e-6);
    EXPECT_NEAR(r.lines[1].expected_bytes, rows * 32 * 2, 1e-6);
    EXPECT_NEAR(r.lines[4].expected_bytes, rows * (32 * 2 + 2 * 4), 1e-6);
    for (const DispatchLine& line : r.lines) EXPECT_EQ(line.sent_bytes, line.route_bytes) << line.name;
    for (const int i : {1, 2, 3}) {
      EXPECT_NEAR(r.lines[i].sent_bytes, r.lines[i].expected_bytes, slack * 32 * 2) << r.lines[i].name;
      EXPECT_EQ(r.lines[i].logical_bytes, 256.0 * 2 * etp * 32 * 2);
    }
  }
}

// 16 experts, top 2: a node of two has one of a token's with probability 1 - C(8, 2) / C(16, 2), a rank of four with
// 1 - C(12, 2) / C(16, 2). A row is sent once to the other node, and in each node to the rank that does not pass it on.
TEST(BenchDispatch, TwoLevelSendsARowOnceToEachNode) {
  const DispatchBench r = bench(4, {.routing = {.kind = BenchRouting::Kind::zipf, .exponent = 0},
                                    .dispatcher = DispatcherKind::two_level,
                                    .ranks_per_node = 2});
  EXPECT_EQ(r.dispatcher, "two_level");
  EXPECT_EQ(r.nodes, 2);
  const double across = 256 * (1 - 28.0 / 120), inside = 256 * 2 * (1 - 66.0 / 120);
  ASSERT_EQ(r.lines.size(), 5u);
  EXPECT_NEAR(r.lines[0].expected_bytes, 4 + across * 2 * 8 + 4 * 4 + inside * 2 * 8, 1e-6);
  EXPECT_NEAR(r.lines[1].expected_bytes, (across + inside) * 32 * 2, 1e-6);
  EXPECT_NEAR(r.lines[2].expected_bytes, across * 32 * 4 + inside * 32 * 2, 1e-6);
  EXPECT_NEAR(r.lines[4].expected_bytes, across * (32 * 4 + 8) + inside * (32 * 2 + 8), 1e-6);
  for (const DispatchLine& line : r.lines) {
    EXPECT_EQ(line.sent_bytes, line.route_bytes) << line.name;
    EXPECT_EQ(line.across_bytes, line.across_route_bytes) << line.name;
    EXPECT_GT(line.inside_bytes(), 0) << line.name;
  }
  EXPECT_NEAR(r.lines[1].across_bytes, across * 32 * 2, 5 * 16 * 32 * 2);
}

// Threads can write to each other's memory, so a training run on them has the direct dispatcher.
TEST(BenchDispatch, ChoosesTheDispatcherOfARun) {
  for (const int ranks : {2, 4}) EXPECT_EQ(bench(ranks, {}).dispatcher, "direct") << ranks;
}

// Ranks of a node add bf16 first, and their f32 sums cross nodes.
TEST(BenchDispatch, AllGatherOverNodesSendsTheBytesOfTheFormula) {
  const DispatchBench r = bench(4, {.dispatcher = DispatcherKind::allgather, .ranks_per_node = 2});
  const double rows = 256.0 * 32 * 2;
  EXPECT_EQ(r.lines[1].sent_bytes, 3 * rows);
  EXPECT_EQ(r.lines[2].sent_bytes, 2 * rows + 2 * rows);
}

TEST(BenchDispatch, OneRankIsComparedWithACopyOfItsRows) {
  const DispatchBench r = bench(1, {});
  EXPECT_EQ(r.dispatcher, "local");
  for (const DispatchLine& line : r.lines) EXPECT_EQ(line.sent_bytes, 0);
  EXPECT_GT(r.copy_gbytes_per_s, 0);
  EXPECT_GT(r.dispatch_gbytes_per_s, 0);
}

TEST(BenchDispatch, RanksThatDoNotDivideAreRefused) {
  expect_error(ErrorKind::usage, "bench dispatch: --etp must divide the ranks: 3 % 2 must be 0; choose others",
               [] { bench(3, {.etp = 2}); });
  expect_error(ErrorKind::usage,
               "bench dispatch: ep = ranks / etp = 3 must divide the 16 experts of bench-cpu; choose other ranks",
               [] { bench(3, {}); });
  expect_error(ErrorKind::usage, "deepseek-v3-8-local has as many experts as a token chooses",
               [] { bench(2, {.shape = "deepseek-v3-8-local", .routing = {.kind = BenchRouting::Kind::zipf}}); });
}

}  // namespace
}  // namespace moebius
