#include "train/state.h"

#include <nlohmann/json.hpp>

namespace moebius {

namespace {

TensorSlice slice_of(const Param& p, const ParamPart& part) {
  const ElementRange range = owned_of(p, part);
  return {.shape = dims_of(part.shape), .shard = part.shard, .begin = range.begin, .end = range.end()};
}

// A trained element is owned by one rank alone; an untrained one is the same on every rank
// of its group.
bool is_replica(const Param& p, const Mesh& mesh) {
  return p.spec.tied_copy || (!p.has_grad && mesh.group(p.spec.grad_axis).rank() > 0);
}

void add_parts(std::vector<NamedTensor>& state, const std::string& prefix, const Tensor& owned, const Param& p,
               const Mesh& mesh) {
  for (const ParamPart& part : p.spec.parts) {
    state.push_back({.name = prefix + part.name,
                     .tensor = owned_part_of(owned, p, part),
                     .slice = slice_of(p, part),
                     .is_replica = is_replica(p, mesh),
                     .converts = p.has_grad});
  }
}

// A checkpoint holds tensors whose elements are values by themselves.
Tensor plain(const OptimizerState& state) {
  check_plain("training_state", state.param->spec.name.c_str(), state.values);
  return state.values.data;
}

}  // namespace

std::vector<NamedTensor> training_state(Engine& engine) {
  std::vector<NamedTensor> state;
  const bool has_adapters = engine.spec().lora.is_on();
  for (const Param& p : engine.model().params().all()) {
    if (has_adapters && p.frozen) continue;
    add_parts(state, "", p.master(), p, engine.mesh());
  }
  for (const OptimizerState& each : engine.optimizer().state())
    add_parts(state, std::string(each.prefix), plain(each), *each.param, engine.mesh());
  return state;
}

nlohmann::json checkpoint_meta(const RunSpec& run, int64_t step, const std::string& data) {
  return {{"step", step},
          {"model", hf_from_model_spec(run.model)},
          {"recipe", to_toml(run, false)},
          {"identity", train_identity(run)},
          {"data", data}};
}

}  // namespace moebius
