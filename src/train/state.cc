#include "train/state.h"

#include <nlohmann/json.hpp>

namespace moebius {

namespace {

TensorSlice slice_of(const Param& p, const ParamPart& part) {
  const ElementRange range = owned_of(p, part);
  return {.shape = dims_of(part.shape), .shard = part.shard, .begin = range.begin, .end = range.end()};
}

// A trained element has exactly one owner, and so has one of sharded weights; other elements are the same on every rank
// of their group.
bool is_replica(const Param& p, const Mesh& mesh) {
  const bool is_apart = p.has_grad || p.shards_weights();
  return p.spec.tied_copy || (!is_apart && mesh.group(p.spec.grad_axis).rank() > 0);
}

void add_parts(std::vector<NamedTensor>& state, const std::string& prefix, const Tensor& owned, const Param& p,
               const Mesh& mesh) {
  for (const ParamPart& part : p.spec.parts) {
    state.push_back({.name = prefix + part.name,
                     .tensor = owned_part_of(owned, p, part),
                     .slice = slice_of(p, part),
                     .is_replica = is_replica(p, mesh),
                     .converts = p.has_grad});
    if (p.has_remainder) state.back().remainder = owned_part_of(p.remainder_n, p, part);
  }
}

// Returns the scales of the n owned elements of a part.
Tensor scales_of_part(const OptimizerState& state, const ParamPart& part, int64_t n) {
  if (n == 0) return state.scales.rows(0, 0);
  const int64_t first = part.offset + owned_of(*state.param, part).begin - state.param->owned.begin;
  return state.scales.rows(first / kCodeBlock, (first + n) / kCodeBlock);
}

// Codes of 8-bit blocks are saved together with their scales.
void add_state(std::vector<NamedTensor>& all, const OptimizerState& state, const Mesh& mesh) {
  const Param& p = *state.param;
  for (const ParamPart& part : p.spec.parts) {
    NamedTensor values{.name = std::string(state.prefix) + part.name,
                       .tensor = owned_part_of(state.values, p, part),
                       .slice = slice_of(p, part),
                       .is_replica = is_replica(p, mesh),
                       .converts = true};
    if (has_code_blocks(part.shape)) values.code = state.code;
    const bool is_coded = state.values.dtype == DType::u8;
    if (is_coded) values.scales = scales_of_part(state, part, values.tensor.numel());
    all.push_back(values);
    if (!is_coded) continue;
    all.push_back({.name = values.name + std::string(kScalesSuffix),
                   .tensor = values.scales,
                   .slice = scales_slice(*values.slice),
                   .is_replica = values.is_replica,
                   .is_scales = true});
  }
}

}  // namespace

std::vector<NamedTensor> training_state(Engine& engine) {
  std::vector<NamedTensor> state;
  const bool has_adapters = engine.spec().lora.is_on();
  for (const Param& p : engine.model().params().all()) {
    if (has_adapters && p.frozen) continue;
    add_parts(state, "", p.master(), p, engine.mesh());
  }
  for (const OptimizerState& each : engine.optimizer().state()) add_state(state, each, engine.mesh());
  return state;
}

nlohmann::json checkpoint_meta(const RunSpec& run, int64_t step, const RunInputs& inputs) {
  nlohmann::json meta = {{"step", step},
                         {"model", hf_from_model_spec(run.model)},
                         {"recipe", to_toml(run, /*with_provenance=*/false)},
                         {"identity", train_identity(run)},
                         {"data", inputs.data},
                         {"dispatcher", inputs.dispatcher}};
  if (inputs.base) meta[kBaseKey] = to_text(*inputs.base);
  return meta;
}

}  // namespace moebius
