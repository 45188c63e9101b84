#include "model/attention/token_runs.h"

#include <gtest/gtest.h>

#include "io/testing.h"

namespace moebius {
namespace {

using Runs = std::vector<TokenRun>;

TEST(TokenRuns, OneRankHasAllInOrder) { EXPECT_EQ(token_runs({.batch = 3, .seq = 5}, {}, {}), (Runs{{0, 0, 15}})); }

TEST(TokenRuns, TensorRanksHaveBlocks) {
  EXPECT_EQ(token_runs({.batch = 3, .seq = 4}, {.tp = 2}, {.tp = 1}), (Runs{{0, 6, 6}}));
}

TEST(TokenRuns, ContextRanksHaveAnEarlyAndALatePieceOfEachSequence) {
  const BatchShape shape{.batch = 2, .seq = 4};  // sequences of 8
  EXPECT_EQ(token_runs(shape, {.cp = 2}, {.cp = 0}), (Runs{{0, 0, 2}, {2, 6, 2}, {4, 8, 2}, {6, 14, 2}}));
  EXPECT_EQ(token_runs(shape, {.cp = 2}, {.cp = 1}), (Runs{{0, 2, 2}, {2, 4, 2}, {4, 10, 2}, {6, 12, 2}}));
}

TEST(TokenRuns, EveryTokenIsOnceOnARank) {
  const BatchShape shape{.batch = 3, .seq = 8};
  const MeshShape mesh{.tp = 3, .cp = 4};
  std::vector<int> seen(shape.tokens() * mesh.cp);
  for (int64_t tp = 0; tp < mesh.tp; ++tp) {
    for (int64_t cp = 0; cp < mesh.cp; ++cp) {
      int64_t row = 0;
      for (const TokenRun& run : token_runs(shape, mesh, {.tp = tp, .cp = cp})) {
        EXPECT_EQ(run.row, row);
        row += run.count;
        for (int64_t i = 0; i < run.count; ++i) ++seen[run.token + i];
      }
      EXPECT_EQ(row, rows_between_projections(shape, mesh));
    }
  }
  EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
}

TEST(TokenRuns, RowsThatDoNotDivideAreRefused) {
  expect_error(ErrorKind::usage,
               "parallel.tp must divide the tokens of a micro-batch on a rank, 3 sequences of 5 tokens: "
               "15 % 2 must be 0; choose another train.micro_batch, train.seq_len or parallel.tp",
               [] { rows_between_projections({.batch = 3, .seq = 5}, {.tp = 2}); });
}

}  // namespace
}  // namespace moebius
