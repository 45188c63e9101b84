#include "train/state.h"

namespace moebius {

std::vector<NamedTensor> training_state(Engine& engine) {
  std::vector<NamedTensor> state;
  for (const Param& p : engine.model().params().all()) {
    for (const ParamPart& part : p.spec.parts) state.push_back({part.name, part_of(p.master(), part)});
  }
  for (const auto& moments : engine.optimizer().moments()) {
    for (const ParamPart& part : moments.param->spec.parts) {
      state.push_back({"adam_m." + part.name, part_of(moments.m, part)});
      state.push_back({"adam_v." + part.name, part_of(moments.v, part)});
    }
  }
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
