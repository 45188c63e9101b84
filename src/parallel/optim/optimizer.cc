#include "parallel/optim/optimizer.h"

#include <algorithm>
#include <span>

#include "core/error.h"
#include "parallel/optim/adamw.h"

namespace moebius {
namespace {

// All that the rest of the program knows of an optimizer.
struct OptimizerEntry {
  OptimizerKind kind;
  std::span<const std::string_view> state_prefixes;
  std::unique_ptr<Optimizer> (*make)(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan);
};

template <class T>
std::unique_ptr<Optimizer> make(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan) {
  return std::make_unique<T>(spec, params, plan);
}

constexpr OptimizerEntry kOptimizers[] = {
    {OptimizerKind::adamw, AdamWOptimizer::kStatePrefixes, make<AdamWOptimizer>},
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan) {
  for (const OptimizerEntry& each : kOptimizers)
    if (each.kind == spec.kind) return each.make(spec, params, plan);
  MOEBIUS_FAIL(internal, "make_optimizer: unknown kind {}", static_cast<int>(spec.kind));
}

bool is_optimizer_state(std::string_view tensor_name) {
  return std::any_of(std::begin(kOptimizers), std::end(kOptimizers), [&](const OptimizerEntry& each) {
    return std::any_of(each.state_prefixes.begin(), each.state_prefixes.end(),
                       [&](std::string_view prefix) { return tensor_name.starts_with(prefix); });
  });
}

}  // namespace moebius
