#include "model/layers/row_chunks.h"

#include <algorithm>

#include "model/moe/chunked_experts.h"

namespace moebius {

int64_t row_chunk(const LayerContext& c) {
  const int64_t t = c.stream_rows();
  return c.expert_chunk > 0 ? std::min(c.expert_chunk, t) : expert_chunk(t, c.lora);
}

LayerContext of_chunk(LayerContext c, int64_t chunk) {
  c.shape.batch = 1;
  c.shape.seq = chunk * c.mesh.shape().tp;
  return c;
}

MicroBatch later_part(const MicroBatch& batch) {
  MicroBatch later = batch;
  later.first_of_step = false;
  later.later_part = true;
  return later;
}

bool is_long_sequence(const LayerContext& c, int64_t times) {
  constexpr int64_t kLong = 65536;
  return c.shape.seq > times * (c.expert_chunk > 0 ? c.expert_chunk : kLong);
}

}  // namespace moebius
