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

MicroBatch batch_of_chunk(const MicroBatch& batch, int64_t first_row) {
  MicroBatch chunk = batch;
  chunk.first_row = first_row;
  if (first_row > 0) {
    chunk.first_of_step = false;
    chunk.later_part = true;
  }
  return chunk;
}

bool is_long_sequence(const LayerContext& c, int64_t times) {
  constexpr int64_t kLong = 65536;
  return c.shape.seq > times * (c.expert_chunk > 0 ? c.expert_chunk : kLong);
}

}  // namespace moebius
