// The tokens of a micro-batch that a rank's rows hold. A micro-batch is spread over the tp x cp
// ranks of its stage, and every token of it is in one row of one of them:
//   cp   A sequence is cut into 2 CP pieces of equal length. Context rank c has the pieces c and
//        2 CP - 1 - c, so that causal attention is the same work everywhere. Its rows are these tokens,
//        sequence after sequence. BatchShape of a rank gives their number (seq: tokens of one sequence
//        here, 1/CP of it), and MicroBatch their contents.
//   tp   Between the projections (norms, router, experts) tensor rank r has the following block of these rows:
//        [r T/TP, (r + 1) T/TP): sequence parallelism.
// With dynamic cp a micro-batch may be shared by fewer ranks: by blocks of `sharing` neighbours of cp
// (MicroBatch::cp). Then each sequence is cp / sharing sequences, one after the other, and each block has
// one of them. Within a block the tokens are spread as above. The number of rows does not change.
// MicroBatch::first_token is the index in the global batch of the micro-batch's first
// token, the same on all of them.
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

// Rows between the projections on each rank. Error{usage} with the equation unless tp
// divides the tokens.
int64_t rows_between_projections(const BatchShape& shape, const MeshShape& mesh);
// Returns the tokens of these rows on the rank at `place` (its tp and cp are read): rows ascend,
// and so do tokens. sharing: as MicroBatch::cp, a divisor of cp, 0 for cp itself.
// REQUIRES: 2 cp divides the sequence where cp > 1.
std::vector<TokenRun> token_runs(const BatchShape& shape, const MeshShape& mesh, const RankPlace& place,
                                 int64_t sharing = 0);
// The positions in a sequence of the rows that context rank c has of it, ascending.
// REQUIRES: as token_runs.
std::vector<int64_t> positions_of_context(int64_t seq_len, int64_t cp, int64_t c, int64_t sharing = 0);

}  // namespace moebius
