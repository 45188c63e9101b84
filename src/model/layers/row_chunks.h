// Layers that compute a micro-batch of many rows in chunks, one after another, so that their scratch does not grow with
// it; and the rule for long sequences. Both depend on the shape alone. So runs of one shape sum weight gradients in the
// same order, whatever they save or recompute.
#pragma once

#include "model/layer_context.h"

namespace moebius {

// Returns the rows of a chunk of a layer with c.stream_rows() rows, a divisor of these: that of one rank's experts
// (model/moe/chunked_experts.h). All of them are one chunk if there are few.
int64_t row_chunk(const LayerContext& c);
// Returns the context of a layer whose micro-batch is one chunk.
LayerContext of_chunk(LayerContext c, int64_t chunk);
// The step of the chunk that begins at this row of the rank's residual stream. The products of all chunks but the first
// add to the gradients that the first has stored.
struct ChunkStep {
  ChunkStep(Step& whole, int64_t first_row);
  ChunkStep(const ChunkStep&) = delete;

  MicroBatch batch;
  Step step;
};

// Returns whether a sequence has so many tokens on the rank, more than 65536, that its attention takes much longer than
// the projections of queries, keys and values. Layers of attention then compute these projections once more instead of
// holding their results while other ops run.
// times: the sequence has more than this many times 65536 tokens.
bool is_long_sequence(const LayerContext& c, int64_t times = 1);

}  // namespace moebius
