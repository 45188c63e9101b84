#include "parallel/optim/kept_states.h"

#include <algorithm>

#include "core/block_code.h"
#include "memory/plan.h"
#include "parallel/optim/optimizer.h"

namespace moebius {
namespace {

// Offsets of tensors of any of these dtypes are then multiples of their alignment.
constexpr int64_t kUnit = MemoryPlan::kAlign * 4;

int64_t rounded(int64_t bytes) { return div_ceil(bytes, kUnit) * kUnit; }

}  // namespace

StatesOf states_of(const Param& p) {
  const auto has_blocks = [](const ParamPart& part) { return has_code_blocks(part.shape); };
  return {.weights = p.w.dtype,
          .count = p.owned.count,
          .of_matrices = is_of_matrices(p.spec),
          .has_blocks = std::all_of(p.spec.parts.begin(), p.spec.parts.end(), has_blocks)};
}

int64_t states_bytes(const OptimizerSpec& spec, const StatesOf& of) {
  const bool is_coded = spec.state == StateFormat::blocks_8bit && of.has_blocks;
  int64_t moment = rounded(of.count * (spec.state == StateFormat::bf16 ? 2 : 4));
  if (is_coded) moment = rounded(of.count) + rounded(of.count / kCodeBlock * size_of(DType::f32));
  return rounded(of.count * master_bytes(spec, of.weights)) + num_moments(spec, of.of_matrices) * moment;
}

std::vector<bool> kept_states(const OptimizerSpec& spec, std::span<const StatesOf> params) {
  std::vector<bool> kept(params.size());
  if (!spec.offload) return kept;
  double left = spec.offload_buffer.value_or(0) * static_cast<double>(int64_t{1} << 30);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto bytes = static_cast<double>(states_bytes(spec, params[i]));
    kept[i] = bytes > 0 && bytes <= left;
    if (kept[i]) left -= bytes;
  }
  return kept;
}

void keep_states(const OptimizerSpec& spec, ParamTable& params) {
  std::vector<size_t> indices;
  std::vector<StatesOf> all;
  for (size_t i = 0; i < params.all().size(); ++i) {
    if (!params.all()[i].has_grad) continue;
    indices.push_back(i);
    all.push_back(states_of(params.all()[i]));
  }
  const std::vector<bool> kept = kept_states(spec, all);
  for (size_t k = 0; k < kept.size(); ++k)
    if (kept[k]) params.keep_states(indices[k]);
}

}  // namespace moebius
