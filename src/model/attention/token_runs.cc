#include "model/attention/token_runs.h"

#include <algorithm>

namespace moebius {
namespace {

// A rank of cp. Blocks of `sharing` neighbouring ranks share a sequence.
struct Context {
  int64_t cp, rank, sharing;
};

// Returns all rows of a context rank.
std::vector<TokenRun> rows_of_context(const BatchShape& shape, const Context& c) {
  if (c.cp == 1) return {{.row = 0, .token = 0, .count = shape.tokens()}};
  MOEBIUS_ASSERT(shape.seq % 2 == 0);
  const int64_t sharing = c.sharing == 0 ? c.cp : c.sharing;
  MOEBIUS_ASSERT(c.cp % sharing == 0);
  std::vector<TokenRun> runs;
  const int64_t piece = shape.seq / 2, block = c.rank / sharing, member = c.rank % sharing;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t row = b * shape.seq, token = row * c.cp + block * sharing * shape.seq;
    runs.push_back({.row = row, .token = token + member * piece, .count = piece});
    runs.push_back({.row = row + piece, .token = token + (2 * sharing - 1 - member) * piece, .count = piece});
  }
  return runs;
}

}  // namespace

int64_t rows_between_projections(const BatchShape& shape, const MeshShape& mesh) {
  MOEBIUS_CHECK(
      usage, shape.tokens() % mesh.tp == 0,
      "parallel.tp must divide the tokens of a micro-batch on a rank, {} sequences of {} tokens: {} % {} must "
      "be 0; choose another train.micro_batch, train.seq_len or parallel.tp",
      shape.batch, shape.seq, shape.tokens(), mesh.tp);
  return shape.tokens() / mesh.tp;
}

std::vector<TokenRun> token_runs(const BatchShape& shape, const MeshShape& mesh, const RankPlace& place,
                                 int64_t sharing) {
  const int64_t rows = rows_between_projections(shape, mesh), begin = place.tp * rows, end = begin + rows;
  std::vector<TokenRun> runs;
  for (const TokenRun& all : rows_of_context(shape, {mesh.cp, place.cp, sharing})) {
    const int64_t first = std::max(all.row, begin), last = std::min(all.row + all.count, end);
    if (first < last) runs.push_back({first - begin, all.token + first - all.row, last - first});
  }
  return runs;
}

std::vector<int64_t> positions_of_context(int64_t seq_len, int64_t cp, int64_t c, int64_t sharing) {
  std::vector<int64_t> positions;
  for (const TokenRun& run : rows_of_context({.batch = 1, .seq = seq_len / cp}, {cp, c, sharing}))
    for (int64_t i = 0; i < run.count; ++i) positions.push_back(run.token + i);
  return positions;
}

}  // namespace moebius
