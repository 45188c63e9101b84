#include "parallel/optim/optimizer.h"

#include <algorithm>
#include <span>

#include "core/error.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "parallel/optim/adamw.h"
#include "parallel/optim/matrix_batches.h"
#include "parallel/optim/muon.h"
#include "parallel/optim/sgd.h"

namespace moebius {
namespace {

// The properties of an optimizer that the rest of the program uses.
struct OptimizerEntry {
  OptimizerKind kind;
  std::span<const std::string_view> state_prefixes;
  int64_t (*num_moments)(const OptimizerSpec& spec, bool of_matrices);
  std::unique_ptr<Optimizer> (*make)(const OptimizerContext& context);
};

template <class T>
std::unique_ptr<Optimizer> make(const OptimizerContext& context) {
  return std::make_unique<T>(context);
}

constexpr OptimizerEntry kOptimizers[] = {
    {OptimizerKind::adamw, AdamWOptimizer::kStatePrefixes, AdamWOptimizer::num_moments, make<AdamWOptimizer>},
    {OptimizerKind::sgd, SgdOptimizer::kStatePrefixes, SgdOptimizer::num_moments, make<SgdOptimizer>},
    {OptimizerKind::muon, MuonOptimizer::kStatePrefixes, MuonOptimizer::num_moments, make<MuonOptimizer>},
};

const OptimizerEntry& entry_of(OptimizerKind kind) {
  for (const OptimizerEntry& each : kOptimizers)
    if (each.kind == kind) return each;
  MOEBIUS_FAIL(internal, "optimizer: unknown kind {}", static_cast<int>(kind));
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerContext& context) {
  return entry_of(context.spec.kind).make(context);
}

int64_t num_moments(const OptimizerSpec& spec, bool of_matrices) {
  return entry_of(spec.kind).num_moments(spec, of_matrices);
}

// A row or a column has no directions to even out.
bool is_of_matrices(const ParamSpec& spec) {
  if (spec.kind != ParamKind::matrix && spec.kind != ParamKind::experts) return false;
  const auto is_matrix = [](const Shape& s) { return s.rank() == 2 && s[0] > 1 && s[1] > 1; };
  return spec.parts.empty() ? is_matrix(spec.shape)
                            : std::all_of(spec.parts.begin(), spec.parts.end(),
                                          [&](const ParamPart& part) { return is_matrix(part.shape); });
}

void UpdateScratch::at_least(const UpdateScratch& other) {
  matrix = std::max(matrix, other.matrix);
  newton_schulz_bytes = std::max(newton_schulz_bytes, other.newton_schulz_bytes);
}

// MuonOptimizer::update() takes this many bytes of the stack.
int64_t UpdateScratch::stack_bytes() const {
  const auto aligned = [](int64_t bytes) { return div_ceil(bytes, StepStack::kAlign) * StepStack::kAlign; };
  if (matrix == 0) return 0;
  return 4 * StepStack::kAlign + 2 * aligned(matrix * size_of(DType::f32)) + aligned(newton_schulz_bytes);
}

UpdateScratch update_scratch(const OptimizerSpec& spec, const ParamSpec& param) {
  UpdateScratch most;
  if (spec.kind != OptimizerKind::muon || !param.trainable || !is_of_matrices(param)) return most;
  const auto add = [&](const Shape& s, int64_t count) {
    const int64_t n = matrices_at_once(s.numel(), count);
    most.at_least(
        {.matrix = n * s.numel(), .newton_schulz_bytes = NewtonSchulz::scratch_bytes({n, s[0], s[1]}, param.dtype)});
  };
  if (param.parts.empty()) add(param.shape, 1);
  for (const ParamPart& part : param.parts) {
    add(part.shape, std::count_if(param.parts.begin(), param.parts.end(),
                                  [&](const ParamPart& other) { return other.shape == part.shape; }));
  }
  return most;
}

double state_bytes(const OptimizerSpec& spec) {
  const auto moments = static_cast<double>(num_moments(spec));
  switch (spec.state) {
    case StateFormat::f32:
      return 4 * moments;
    case StateFormat::bf16:
      return 2 * moments;
    case StateFormat::blocks_8bit:
      return moments * (1 + 4.0 / kCodeBlock);
  }
  MOEBIUS_FAIL(internal, "optimizer: unknown state format {}", static_cast<int>(spec.state));
}

int64_t master_bytes(const OptimizerSpec& spec, DType weights) {
  if (weights == DType::f32) return 0;
  switch (spec.master) {
    case MasterFormat::f32:
      return 4;
    case MasterFormat::bf16_remainder:
      return 2;
    case MasterFormat::bf16_stochastic:
      return 0;
  }
  MOEBIUS_FAIL(internal, "optimizer: unknown master format {}", static_cast<int>(spec.master));
}

bool is_optimizer_state(std::string_view tensor_name) {
  return std::any_of(std::begin(kOptimizers), std::end(kOptimizers), [&](const OptimizerEntry& each) {
    return std::any_of(each.state_prefixes.begin(), each.state_prefixes.end(),
                       [&](std::string_view prefix) { return tensor_name.starts_with(prefix); });
  });
}

}  // namespace moebius
