#include "model/moe/routed_experts.h"

#include "model/moe/dispatched_experts.h"

namespace moebius {

std::unique_ptr<RoutedExperts> make_routed_experts(const LayerContext& c, const std::string& prefix) {
  return std::make_unique<DispatchedExperts>(c, prefix);
}

}  // namespace moebius
