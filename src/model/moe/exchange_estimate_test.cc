#include "model/moe/exchange_estimate.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace moebius {
namespace {

// 4096 tokens of a rank, top-8 of 128 experts, in bf16, on 4 nodes of 8 ranks.
const DispatchShape kRows{.T = 4096, .D = 2048, .K = 8, .E = 128, .W = 32, .ep = 32, .node = 8, .element_bytes = 2};
const double kRow = 4096.0 * 2048 * 2, kPairs = 4096.0 * 8 * 4;
const ExchangeRates kRates{1e9, 10e9, 0, 0, "rates of a test"};

double step_bytes(const DispatchCost& c) {
  return c.announce.wire_bytes + 2 * c.dispatch.wire_bytes + c.combine.wire_bytes + c.combine_bwd.wire_bytes +
         c.dispatch_bwd.wire_bytes;
}

double all_bytes(const ExchangeEstimate& e) { return e.across_bytes + e.inside_bytes; }

// Groups count these bytes (bench_test and tests_distributed compare them with dispatcher_cost.h).
TEST(ExchangeEstimate, BytesOnCpusAreThoseOfTheCounters) {
  for (const int64_t node : {1, 2, 4, 8}) {
    for (const double element : {2.0, 4.0}) {
      DispatchShape rows = kRows;
      rows.node = node, rows.element_bytes = element;
      const int64_t nodes = rows.W / node;
      const ExchangeEstimates e = exchange_estimates({.rows = rows, .sent_element_bytes = element}, kRates);
      EXPECT_DOUBLE_EQ(all_bytes(e.allgather), step_bytes(allgather_dispatch_cost(rows))) << node;
      EXPECT_DOUBLE_EQ(all_bytes(e.alltoall), step_bytes(alltoall_dispatch_cost(rows, rows.T * 8 * 31 / 32.0)));
      const TwoLevelCost cost =
          two_level_dispatch_cost(rows, static_cast<double>(nodes - 1) * even_rows_of_part(rows, nodes),
                                  static_cast<double>(rows.W - nodes) * even_rows_of_part(rows, rows.ep));
      EXPECT_DOUBLE_EQ(e.two_level.across_bytes, step_bytes(cost.across));
      EXPECT_DOUBLE_EQ(e.two_level.inside_bytes, step_bytes(cost.inside));
    }
  }
}

// Level 0 of a collective is a node, so a rank sends 3 rows of 31 to other nodes. Sums of nodes are f32.
TEST(ExchangeEstimate, CollectivesOnCpusCrossNodesOnceForEachNode) {
  const ExchangeEstimate e = exchange_estimates({.rows = kRows}, kRates).allgather;
  EXPECT_DOUBLE_EQ(e.across_bytes, 3 * (3 * kRow + 2 * 2 * kRow + 4 * kPairs));
  EXPECT_DOUBLE_EQ(e.inside_bytes, 28 * (5 * kRow + 4 * kPairs));
}

// Over NCCL the first level of a sum is a node too. A gather of many ranks is a ring, which crosses nodes on the links
// of all 8 ranks.
TEST(ExchangeEstimate, GathersOfManyGpusAreRings) {
  const ExchangeEstimate e = exchange_estimates({.rows = kRows, .on_gpu = true, .captures = true}, kRates).allgather;
  EXPECT_DOUBLE_EQ(e.across_bytes, 3 * 2 * 2 * kRow + 31 / 8.0 * (3 * kRow + 4 * kPairs));
  EXPECT_DOUBLE_EQ(all_bytes(e), step_bytes(allgather_dispatch_cost(kRows))) << "what the groups count";
  const ExchangeEstimate rings =
      exchange_estimates({.rows = kRows, .on_gpu = true, .captures = true, .rings = true}, kRates).allgather;
  EXPECT_DOUBLE_EQ(rings.across_bytes, 31 / 8.0 * (5 * kRow + 4 * kPairs));
  DispatchShape few = kRows;
  few.W = few.ep = 8, few.node = 4;
  EXPECT_DOUBLE_EQ(exchange_estimates({.rows = few, .on_gpu = true}, kRates).allgather.across_bytes,
                   2 * 2 * kRow + 4 * (3 * kRow + 4 * kPairs));
}

// Captured messages have the size of all tokens. Eager ones have the size of their rows.
TEST(ExchangeEstimate, CapturedMessagesOfTwoLevelHaveFixedSizes) {
  const auto across = [](bool on_gpu, bool captures) {
    return exchange_estimates({.rows = kRows, .on_gpu = on_gpu, .captures = captures}, kRates).two_level.across_bytes;
  };
  EXPECT_DOUBLE_EQ(across(true, true), 3 * (3 * kRow + 2 * 2 * kRow + 3 * kPairs));
  EXPECT_LT(across(true, false), 0.95 * across(true, true));
  EXPECT_DOUBLE_EQ(across(true, false), across(false, false));
}

// Rows to the experts may be packed in 8 bits. Rows that return are not.
TEST(ExchangeEstimate, PackedRowsAreSentToTheExpertsAlone) {
  const ExchangeEstimate e = exchange_estimates({.rows = kRows, .sent_element_bytes = 1}, kRates).allgather;
  EXPECT_DOUBLE_EQ(e.across_bytes, 3 * (3 * kRow / 2 + 2 * 2 * kRow + 4 * kPairs));
}

TEST(ExchangeEstimate, TimesFollowFromTheRates) {
  const ExchangeShape x{.rows = kRows, .on_gpu = true, .captures = true};
  const ExchangeEstimates slow = exchange_estimates(x, kRates);
  // The slower link of each gather, and both levels of each sum.
  EXPECT_DOUBLE_EQ(slow.allgather.seconds, slow.allgather.across_bytes / 1e9 + 2 * 28 * kRow / 10e9);
  EXPECT_DOUBLE_EQ(slow.two_level.seconds, slow.two_level.across_bytes / 1e9 + slow.two_level.inside_bytes / 10e9);
  ExchangeRates distant = kRates;
  distant.across_call_s = 1, distant.inside_call_s = 0.25;
  EXPECT_NEAR(exchange_estimates(x, distant).allgather.seconds - slow.allgather.seconds, 7 + 2 * 1.25, 1e-6);
  EXPECT_NEAR(exchange_estimates(x, distant).two_level.seconds - slow.two_level.seconds, 6 * 1.25, 1e-6);
  EXPECT_EQ(slow.rates, "1 GB/s across nodes and 10 GB/s inside, rates of a test");
}

// Every token has experts on every rank, so two-level sends as many rows inside nodes, and sends them after the others.
TEST(ExchangeEstimate, TheRatesTurnTheOrder) {
  DispatchShape rows = kRows;
  rows.W = 16, rows.ep = 8, rows.E = 8;
  const auto at = [&](double across_bytes_s) {
    ExchangeRates rates = kRates;
    rates.across_bytes_s = across_bytes_s;
    return exchange_estimates({.rows = rows, .on_gpu = true, .captures = true}, rates);
  };
  EXPECT_LT(1.1 * at(0.1e9).two_level.seconds, at(0.1e9).allgather.seconds);
  EXPECT_LT(1.1 * at(1e9).allgather.seconds, at(1e9).two_level.seconds);
}

}  // namespace
}  // namespace moebius
