#include "parallel/optim/optimizer.h"

#include <algorithm>
#include <span>

#include "core/error.h"
#include "parallel/optim/adamw.h"
#include "parallel/optim/sgd.h"

namespace moebius {
namespace {

// All that the rest of the program knows of an optimizer.
struct OptimizerEntry {
  OptimizerKind kind;
  std::span<const std::string_view> state_prefixes;
  int64_t (*num_moments)(const OptimizerSpec& spec);
  std::unique_ptr<Optimizer> (*make)(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan);
};

template <class T>
std::unique_ptr<Optimizer> make(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan) {
  return std::make_unique<T>(spec, params, plan);
}

constexpr OptimizerEntry kOptimizers[] = {
    {OptimizerKind::adamw, AdamWOptimizer::kStatePrefixes, AdamWOptimizer::num_moments, make<AdamWOptimizer>},
    {OptimizerKind::sgd, SgdOptimizer::kStatePrefixes, SgdOptimizer::num_moments, make<SgdOptimizer>},
};

const OptimizerEntry& entry_of(OptimizerKind kind) {
  for (const OptimizerEntry& each : kOptimizers)
    if (each.kind == kind) return each;
  MOEBIUS_FAIL(internal, "optimizer: unknown kind {}", static_cast<int>(kind));
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan) {
  return entry_of(spec.kind).make(spec, params, plan);
}

int64_t num_moments(const OptimizerSpec& spec) { return entry_of(spec.kind).num_moments(spec); }

bool is_optimizer_state(std::string_view tensor_name) {
  return std::any_of(std::begin(kOptimizers), std::end(kOptimizers), [&](const OptimizerEntry& each) {
    return std::any_of(each.state_prefixes.begin(), each.state_prefixes.end(),
                       [&](std::string_view prefix) { return tensor_name.starts_with(prefix); });
  });
}

}  // namespace moebius
