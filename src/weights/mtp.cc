// Multi-token prediction in folders of weights: modules that may be missing, and tensors that must be copies of others.
#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "checkpoint/reader.h"
#include "hub/hf_folder.h"
#include "weights/adapter.h"
#include "weights/source.h"

namespace moebius {
namespace {

constexpr std::string_view kLayers = "model.layers.";

std::vector<std::string> tensor_names(const WeightsFolder& from) {
  if (from.kind == WeightsFolder::Kind::hugging_face) return HfFolder::open(from.path).names();
  const CheckpointReader checkpoint(from.path, /*check_files=*/false);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : checkpoint.tensors()) names.push_back(name);
  return names;
}

}  // namespace

bool is_of_mtp(const std::string& name, const ModelSpec& model) {
  if (!name.starts_with(kLayers)) return false;
  int64_t layer = -1;
  std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  return layer >= model.num_layers && layer < model.num_layers_and_mtp();
}

bool has_mtp(const WeightsFolder& from, const ModelSpec& model) {
  if (model.num_mtp_layers == 0) return false;
  const std::string base = from.kind == WeightsFolder::Kind::checkpoint ? base_of_adapters(from.path) : "";
  if (!base.empty()) return has_mtp(find_weights(base), model);
  const std::vector<std::string> names = tensor_names(from);
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return is_of_mtp(name, model); });
}

ModelSpec with_mtp_of(const WeightsFolder& from, ModelSpec model) {
  if (model.num_mtp_layers == 0 || has_mtp(from, model)) return model;
  model.num_mtp_layers = 0;
  if (model.source) model.source = hf_from_model_spec(model);
  return model;
}

std::string missing_mtp_notice(const WeightsFolder& from, const ModelSpec& model) {
  return fmt::format(
      "{}: num_nextn_predict_layers is {}, but there are no tensors of model.layers.{}: "
      "the model is taken without multi-token prediction",
      from.path, model.num_mtp_layers, model.num_layers);
}

}  // namespace moebius
