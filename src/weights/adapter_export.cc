// Adapters in PEFT's format, for transformers 4 or 5.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/reader.h"
#include "hub/hf_folder.h"
#include "hub/peft.h"
#include "io/files.h"
#include "model/lora/adapter_params.h"
#include "weights/adapter.h"
#include "weights/copy.h"
#include "weights/load.h"

namespace moebius {
namespace {

constexpr const char* kPrefix = "base_model.model.";

// A tensor of the file, and the adapters that it holds.
struct PeftTensor {
  std::vector<int64_t> shape;
  std::vector<std::pair<size_t, FusedPlace>> held;  // entries of the reader and their places
};

// The names of one version of transformers.
class PeftNames {
 public:
  // fused: whether experts are one parameter, and routers a parameter of their own, as in transformers 5.
  PeftNames(HfFamily family, bool fused) : family_(family), fused_(fused) {}

  // Adds a matrix that could have an adapter.
  void add(const std::string& matrix, bool has_adapter) {
    std::string name = module(matrix);
    const auto expert = parse_expert_name(matrix + ".weight");
    if (!fused_ || matrix.find(".self_attn.") != matrix.npos) {
      targets_.all_modules.push_back(name);
      if (has_adapter) targets_.modules.push_back(name);
      return;
    }
    // PEFT takes the names of projections of dense layers for those of experts, but not the names of their weights.
    name = expert ? fused_name(*expert) : name + ".weight";
    parameters_[name] = parameters_[name] || has_adapter;
  }
  PeftTargets targets() const {
    PeftTargets all = targets_;
    for (const auto& [name, has_adapter] : parameters_) {
      all.all_parameters.push_back(name);
      if (has_adapter) all.parameters.push_back(name);
    }
    return all;
  }
  // In transformers 5 the layers of mixtral have the names of other families.
  std::string module(const std::string& matrix) const {
    return fused_ && family_ == HfFamily::mixtral ? matrix : hf_module(family_, matrix);
  }

 private:
  HfFamily family_;
  bool fused_;
  PeftTargets targets_;
  std::map<std::string, bool> parameters_;
};

// Returns whether transformers 4 has no place for one of the adapters.
bool needs_fused_experts(const ModelSpec& model, const std::vector<std::string>& matrices) {
  const HfFamily family = hf_family(model.family);
  return std::any_of(matrices.begin(), matrices.end(), [&](const std::string& matrix) {
    return matrix.ends_with(".gate_up_proj") || !has_peft_module(family, model.family, matrix);
  });
}

// The projections whose As the experts of a layer have.
struct LayerAs {
  bool gate = false, up = false, down = false;
};

std::map<std::string, LayerAs> as_of_layers(const std::vector<std::string>& matrices) {
  std::map<std::string, LayerAs> layers;
  for (const std::string& matrix : matrices) {
    const auto expert = parse_expert_name(matrix + ".weight");
    if (!expert) continue;
    LayerAs& layer = layers[expert->prefix];
    (expert->projection == ExpertProjection::gate ? layer.gate
     : expert->projection == ExpertProjection::up ? layer.up
                                                  : layer.down) = true;
  }
  return layers;
}

// Returns whether transformers 5 gets all of these adapters only if experts are fused.
bool loses_when_converted(const ModelSpec& model, const std::vector<std::string>& matrices) {
  const auto is_of_expert = [](const std::string& matrix) { return parse_expert_name(matrix + ".weight").has_value(); };
  const auto is_router = [](const std::string& matrix) { return matrix.ends_with(".mlp.gate"); };
  // PEFT converts no adapters of this family. Its other linear layers have the same names in both versions.
  if (model.family == "qwen2_moe")
    return std::any_of(matrices.begin(), matrices.end(),
                       [&](const std::string& matrix) { return is_of_expert(matrix) || is_router(matrix); });
  const std::vector<std::string> all = adaptable_matrices(model);
  const auto is_other_mlp = [&](const std::string& matrix) {
    return matrix.find(".mlp.") != matrix.npos && !is_router(matrix) && !is_of_expert(matrix);
  };
  const auto layers = as_of_layers(matrices);
  return std::any_of(all.begin(), all.end(), is_of_expert) &&
         (std::any_of(matrices.begin(), matrices.end(), is_other_mlp) ||
          std::any_of(layers.begin(), layers.end(),
                      [](const auto& layer) { return layer.second.gate != layer.second.up; }));
}

std::map<std::string, PeftTensor> tensors_of(const AdapterReader& adapters, const ModelSpec& model,
                                             const PeftNames& names, bool fused) {
  ExpertAdapters experts = expert_adapters_of(model, adapters.lora().rank);
  std::map<std::string, LayerAs> layers = as_of_layers(adapters.matrices());
  std::map<std::string, PeftTensor> tensors;
  for (size_t i = 0; i < adapters.entries().size(); ++i) {
    const WeightsEntry& e = adapters.entries()[i];
    const LayerAs layer = layers[e.name.substr(0, e.name.find("mlp."))];
    experts.has_down = layer.down;
    experts.are_stacked = layer.gate && layer.up;
    auto place = fused ? expert_adapter_place(experts, e.name) : std::nullopt;
    if (!place) {
      const char* side = e.name.ends_with(kLoraA) ? kLoraA : kLoraB;
      place = FusedPlace{.name = names.module(adapted_matrix(e.name)) + side, .shape = dims_of(e.shape)};
    }
    PeftTensor& tensor = tensors[kPrefix + place->name];
    tensor.shape = place->shape;
    tensor.held.emplace_back(i, *place);
  }
  return tensors;
}

std::vector<float> values_of(const PeftTensor& tensor, const AdapterReader& adapters) {
  if (tensor.held.front().second.rows == 0) return adapters.read_f32(tensor.held.front().first);  // it is one entry
  std::vector<float> values(static_cast<size_t>(tensor.shape[0] * tensor.shape[1]));
  for (const auto& [entry, place] : tensor.held)
    put_into_fused(values.data(), adapters.read_f32(entry).data(), place, 0, size_of(DType::f32));
  return values;
}

}  // namespace

AdapterExportResult export_adapter(const AdapterExport& spec) {
  const WeightsFolder from = find_weights(spec.model);
  const ModelSpec model = read_model_spec(from.path);
  const std::unique_ptr<AdapterReader> adapters = open_adapter(from.path, model);
  const std::vector<std::string> matrices = adapters->matrices();
  const bool fused = spec.fused_experts || needs_fused_experts(model, matrices);
  std::set<std::string> adapted;  // names of Bs, which every matrix has
  for (const WeightsEntry& e : adapters->entries())
    if (e.name.ends_with(kLoraB)) adapted.insert(adapted_matrix(e.name));
  PeftNames names(hf_family(model.family), fused);
  for (const std::string& matrix : adaptable_matrices(model)) {
    if (fused || has_peft_module(hf_family(model.family), model.family, matrix))
      names.add(matrix, adapted.contains(matrix));
  }
  const std::map<std::string, PeftTensor> tensors = tensors_of(*adapters, model, names, fused);

  AdapterExportResult result{.needs_fused_experts = !fused && loses_when_converted(model, matrices)};
  std::vector<SafetensorsDecl> decls;
  for (const auto& [name, tensor] : tensors) {
    decls.push_back({name, DType::f32, tensor.shape});
    ++result.num_tensors;
    result.bytes += tensor.shape[0] * tensor.shape[1] * size_of(DType::f32);
  }
  NewFolder folder(spec.out);
  SafetensorsMetadata metadata{{"format", "pt"}};
  if (const auto base = adapters->base()) metadata[kPeftBaseKey] = to_text(*base);
  SafetensorsWriter writer(folder.path() + "/" + kPeftWeights, std::move(decls), metadata);
  for (const auto& [name, tensor] : tensors) {
    throw_if_stopped(spec.should_stop);
    const std::vector<float> values = values_of(tensor, *adapters);
    writer.write(name, values.data(), std::ssize(values) * size_of(DType::f32));
  }
  writer.close();
  PeftTargets targets = names.targets();
  for (const auto& [prefix, layer] : as_of_layers(matrices))
    if (fused && layer.gate && layer.up) targets.stacked.push_back(prefix + "mlp.experts.gate_up_proj");
  const nlohmann::json config = peft_config(adapters->lora(), base_of_adapters(from.path), targets);
  write_file_atomic(folder.path() + "/" + kPeftConfig, config.dump(2) + "\n");
  folder.commit();
  return result;
}

}  // namespace moebius
