#include "parallel/optim/optimizer.h"

#include <algorithm>

#include "core/error.h"
#include "parallel/optim/adamw.h"

namespace moebius {

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSpec& spec, ParamTable& params, const Mesh& mesh,
                                          MemoryPlan& plan, const ShardingSpec& sharding) {
  switch (spec.kind) {
    case OptimizerKind::adamw:
      return std::make_unique<AdamWOptimizer>(spec, params, mesh, plan, sharding);
  }
  MOEBIUS_FAIL(internal, "make_optimizer: unknown kind {}", static_cast<int>(spec.kind));
}

bool is_optimizer_state(std::string_view tensor_name) {
  const auto& prefixes = AdamWOptimizer::kStatePrefixes;
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return tensor_name.starts_with(prefix); });
}

}  // namespace moebius
