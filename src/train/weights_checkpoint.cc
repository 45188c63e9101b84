#include <vector>

#include "io/hf_folder.h"
#include "train/checkpoint.h"
#include "train/weights_source.h"

namespace moebius {
namespace {

bool is_optimizer_state(const std::string& name) { return name.starts_with("adam_m.") || name.starts_with("adam_v."); }

// Missing, unexpected and misshapen names, before anything is read.
void check_names(const CheckpointReader& reader, const Model& model, const std::string& folder) {
  std::vector<std::string> missing, unexpected, misshapen;
  std::map<std::string, Shape> wanted;
  for (const Param& p : model.params().all()) {
    for (const ParamPart& part : p.spec.parts) wanted.emplace(part.name, part.shape);
  }
  for (const auto& [name, shape] : wanted) {
    const auto it = reader.tensors().find(name);
    if (it == reader.tensors().end()) {
      if (!is_training_state(name)) missing.push_back(name);
      continue;
    }
    std::vector<int64_t> dims;
    for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
    if (it->second.shape != dims || it->second.dtype != DType::f32) misshapen.push_back(name);
  }
  for (const auto& [name, tensor] : reader.tensors()) {
    if (!wanted.contains(name) && !is_optimizer_state(name) && !is_training_state(name)) unexpected.push_back(name);
  }
  MOEBIUS_CHECK(input, missing.empty() && unexpected.empty() && misshapen.empty(),
                "checkpoint {}: expected exactly the tensors of the model; got {} missing ({}), {} unexpected ({}) and "
                "{} of another shape or "
                "dtype ({}); check that model and checkpoint belong together",
                folder, missing.size(), name_list(missing), unexpected.size(), name_list(unexpected), misshapen.size(),
                name_list(misshapen));
}

}  // namespace

void load_checkpoint_weights(Stream& s, Model& model, const std::string& folder) {
  const CheckpointReader reader(folder);
  check_names(reader, model, folder);
  std::vector<float> values;
  for (const Param& p : model.params().all()) {
    for (const ParamPart& part : p.spec.parts) {
      if (!reader.tensors().contains(part.name)) continue;
      const Tensor to = part_of(p.master(), part);
      if (to.dtype == DType::f32) {
        reader.read(part.name, to, &s);
        continue;
      }
      values.resize(to.numel());
      reader.read(part.name, tensor_of(values.data(), part.shape));
      convert_elements(s, to, values.data(), DType::f32, folder);
    }
  }
}

}  // namespace moebius
