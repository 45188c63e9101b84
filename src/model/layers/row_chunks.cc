#include "model/layers/row_chunks.h"

#include <algorithm>

#include "model/moe/chunked_experts.h"

namespace moebius {

int64_t row_chunk(const LayerContext& c) {
  const int64_t t = c.stream_rows();
  return c.expert_chunk > 0 ? std::min(c.expert_chunk, t) : expert_chunk(t, c.lora);
}

LayerContext of_chunk(LayerContext c, int64_t chunk) {
  c.micro_batch_shape = c.shape;
  c.shape.batch = 1;
  c.shape.seq = chunk * c.mesh.shape().tp;
  return c;
}

ChunkStep::ChunkStep(Step& whole, int64_t first_row)
    : batch(whole.batch), step{.stream = whole.stream, .stack = whole.stack, .batch = batch} {
  batch.first_row = first_row;
  batch.first_of_step = batch.first_of_step && first_row == 0;
}

bool is_long_sequence(const LayerContext& c, int64_t times) {
  constexpr int64_t kLong = 65536;
  return c.shape.seq > times * (c.expert_chunk > 0 ? c.expert_chunk : kLong);
}

}  // namespace moebius
