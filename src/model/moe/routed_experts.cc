#include "model/moe/routed_experts.h"

#include <algorithm>

#include "model/moe/chunked_experts.h"
#include "model/moe/dispatched_experts.h"

namespace moebius {

std::unique_ptr<RoutedExperts> make_routed_experts(const LayerContext& c, const std::string& prefix) {
  const int64_t T = c.stream_rows();
  // Dropout of adapters draws by the row of a token in the micro-batch, which a chunk does not know.
  int64_t chunk = c.lora.dropout > 0 ? T : expert_chunk(T);
  if (c.expert_chunk > 0) chunk = std::min(c.expert_chunk, T);
  auto experts = std::make_unique<DispatchedExperts>(c, prefix, chunk);
  if (chunk == T) return experts;
  return std::make_unique<ChunkedExperts>(c, std::move(experts), chunk);
}

}  // namespace moebius
