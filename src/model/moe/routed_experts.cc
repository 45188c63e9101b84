#include "model/moe/routed_experts.h"

#include <algorithm>

#include "model/moe/chunked_experts.h"
#include "model/moe/dispatched_experts.h"

namespace moebius {

std::unique_ptr<RoutedExperts> make_routed_experts(const LayerContext& c, const std::string& prefix) {
  const int64_t T = c.stream_rows(), ranks = c.mesh.shape().etp * c.mesh.shape().ep;
  const int64_t chunk = c.expert_chunk > 0 ? std::min(c.expert_chunk, T) : expert_chunk(T, c.lora, ranks);
  auto experts = std::make_unique<DispatchedExperts>(c, prefix, chunk);
  if (chunk == T) return experts;
  return std::make_unique<ChunkedExperts>(c, std::move(experts), chunk);
}

}  // namespace moebius
