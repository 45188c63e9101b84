// The tokens that are in the rows of a rank. A micro-batch is spread over the tp x cp ranks of its stage, and each of
// its tokens is in one row of one rank:
//   cp   A sequence is cut into 2 CP pieces of equal length. Context rank c has the pieces c and
//        2 CP - 1 - c, so that causal attention is the same work on every rank. Its rows are these tokens,
//        sequence after sequence. BatchShape has their number (seq: 1/CP of a sequence), and
//        MicroBatch their contents.
//   tp   Sequence parallelism: in norms, router and experts, tensor rank r has the rows
//        [r T/TP, (r + 1) T/TP).
// With dynamic cp, blocks of `sharing` consecutive cp ranks share a micro-batch (MicroBatch::cp). Then each sequence
// consists of cp / sharing sequences, one for each block, and within a block the tokens are spread as above. The number
// of rows does not change.
#pragma once

#include <vector>

#include "comm/layout.h"
#include "model/step.h"

namespace moebius {

// Rows [row, row + count) hold the tokens [token, token + count) of the micro-batch.
struct TokenRun {
  int64_t row = 0, token = 0, count = 0;
  bool operator==(const TokenRun&) const = default;
};

// Returns the number of rows of the residual stream on each rank. Throws Error{usage} with the equation unless tp
// divides the tokens.
int64_t rows_between_projections(const BatchShape& shape, const MeshShape& mesh);
// Returns the tokens of the rows of the rank at `place` (its tp and cp are read), with rows and tokens ascending.
// sharing: as MicroBatch::cp, a divisor of cp; 0: cp itself.
// REQUIRES: 2 cp divides the sequence where cp > 1.
std::vector<TokenRun> token_runs(const BatchShape& shape, const MeshShape& mesh, const RankPlace& place,
                                 int64_t sharing = 0);
// Returns the positions, ascending, of the tokens of a sequence that context rank c has.
// REQUIRES: as token_runs.
std::vector<int64_t> positions_of_context(int64_t seq_len, int64_t cp, int64_t c, int64_t sharing = 0);

}  // namespace moebius
