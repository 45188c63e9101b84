#include "weights/hub_folder.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "config/hf/families.h"
#include "hub/hf_names.h"
#include "io/files.h"
#include "weights/copy.h"
#include "weights/import.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string shard_name(size_t shard, size_t num_shards) {
  if (num_shards == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards);
}

// The differences of scores are too small for bf16, so their correction bias keeps its own dtype.
bool keeps_its_dtype(const std::string& name) { return name.ends_with(".e_score_correction_bias"); }

// Released models repeat the embedding and the head in each module of multi-token prediction.
void add_mtp_copies(const ModelSpec& model, std::vector<TensorCopy>& tensors) {
  const auto copy = [&](const char* original, const std::string& name) {
    const auto at =
        std::find_if(tensors.begin(), tensors.end(), [&](const TensorCopy& t) { return t.name == original; });
    TensorCopy again = *at;
    again.name = name;
    tensors.push_back(std::move(again));
  };
  const char* head = model.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  for (int64_t layer = model.num_layers; layer < model.num_layers_and_mtp(); ++layer) {
    const std::string module = fmt::format("model.layers.{}.", layer);
    const bool is_there = std::any_of(tensors.begin(), tensors.end(),
                                      [&](const TensorCopy& t) { return t.name == module + "enorm.weight"; });
    if (!is_there) continue;
    copy("model.embed_tokens.weight", module + "embed_tokens.weight");
    copy(head, module + "shared_head.head.weight");
  }
}

Shape shape_of(const std::vector<int64_t>& dims) {
  MOEBIUS_ASSERT(dims.size() == 2 || dims.size() == 3);
  return dims.size() == 2 ? Shape{dims[0], dims[1]} : Shape{dims[0], dims[1], dims[2]};
}

// Returns the matrices that are written in 8-bit floats: those that were released so, or else those whose products the
// recipe fp8_block quantises.
std::set<std::string> in_block_fp8(const HubFolder& hub) {
  if (!hub.block_fp8) return {};
  std::set<std::string> names;
  for (size_t i = 0; i < hub.weights.entries().size(); ++i)
    if (!hub.weights.released_scales(i).empty()) names.insert(hub.weights.entries()[i].name);
  if (!names.empty()) return names;
  const std::vector<std::string> all = block_fp8_matrices(ModelCatalog(hub.model));
  return {all.begin(), all.end()};
}

void add_block_fp8(const HubFolder& hub, size_t i, const std::string& name, std::vector<TensorCopy>& tensors) {
  const Shape& shape = hub.weights.entries()[i].shape;
  const ReleasedScales released = hub.weights.released_scales(i);
  const BlockSize block = block_size(ScaleLayout::square_blocks);
  tensors.push_back(
      {.entry = i, .name = name, .shape = shape, .dtype = DType::f8_e4m3, .form = TensorCopy::Form::block_fp8});
  tensors.push_back({.entry = i,
                     .name = name + kScaleSuffix,
                     .shape = released.empty() ? block_scales_shape(shape, block.rows, block.cols)
                                               : block_scales_shape(shape, released.block_rows, released.block_cols),
                     .form = TensorCopy::Form::block_scales});
}

// Returns the tensors under the hub's names; where experts are one there, they are gathered.
std::vector<TensorCopy> hub_tensors(const HubFolder& hub, HfFamily family) {
  std::vector<TensorCopy> tensors;
  std::map<std::string, size_t> fused;
  const std::set<std::string> in_fp8 = in_block_fp8(hub);
  for (size_t i = 0; i < hub.weights.entries().size(); ++i) {
    const WeightsEntry& entry = hub.weights.entries()[i];
    if (is_training_state(entry.name)) continue;
    const DType dtype = keeps_its_dtype(entry.name) ? entry.dtype : hub.dtype.value_or(entry.dtype);
    if (in_fp8.contains(entry.name)) {
      add_block_fp8(hub, i, hf_name(family, entry.name), tensors);
      continue;
    }
    const auto place = fused_place(family, entry.name, dims_of(entry.shape), hub.model.num_experts);
    if (!place) {
      tensors.push_back({i, hf_name(family, entry.name), entry.shape, dtype});
      continue;
    }
    const auto [at, is_first] = fused.emplace(place->name, tensors.size());
    if (is_first) tensors.push_back({.name = place->name, .shape = shape_of(place->shape), .dtype = dtype});
    tensors[at->second].parts.push_back({i, *place});
  }
  add_mtp_copies(hub.model, tensors);
  return tensors;
}

const char* torch_name(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::f64:
      return "float64";
    default:
      return "float32";
  }
}

// Returns the modules with a matrix that is not in 8-bit floats, by the names that transformers and vLLM compare.
json plain_modules(const std::vector<TensorCopy>& tensors) {
  json names = json::array();
  for (const TensorCopy& t : tensors) {
    const std::string suffix = ".weight";
    const bool is_plain = t.dtype != DType::f8_e4m3 && t.shape.rank() == 2 && t.name.ends_with(suffix);
    if (is_plain && !t.name.ends_with("embed_tokens.weight"))
      names.push_back(t.name.substr(0, t.name.size() - suffix.size()));
  }
  return names;
}

bool has_fp8(const std::vector<TensorCopy>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const TensorCopy& t) { return t.dtype == DType::f8_e4m3; });
}

// The config of the folder that the model came from is kept. Else it is that of the recipe fp8_block.
json quantization_config(const ModelSpec& model, const std::vector<TensorCopy>& tensors) {
  const json said = model.source ? model.source->value("quantization_config", json()) : json();
  if (said.is_object() && said.value("quant_method", "") == "fp8") return said;
  const BlockSize block = block_size(ScaleLayout::square_blocks);
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {block.rows, block.cols}},
          {"modules_to_not_convert", plain_modules(tensors)}};
}

// torch_dtype is the dtype of all tensors; if they differ, it keeps its old value.
json config_of(const ModelSpec& model, const std::vector<TensorCopy>& tensors) {
  json config = hf_from_model_spec(model);
  config.erase("quantization_config");  // the weights are unpacked
  if (has_fp8(tensors)) config["quantization_config"] = quantization_config(model, tensors);
  if (!config.contains("architectures")) config["architectures"] = {find_family(model.family)->architecture};
  std::set<DType> dtypes;
  for (const TensorCopy& t : tensors) {
    const bool is_packed = t.form != TensorCopy::Form::values;  // they stand for values of the other tensors' dtype
    if (!keeps_its_dtype(t.name) && !is_packed) dtypes.insert(t.dtype);
  }
  if (dtypes.size() == 1) config["torch_dtype"] = torch_name(*dtypes.begin());
  return config;
}

void write_index(const std::string& folder, const std::vector<ShardCopy>& shards, int64_t bytes) {
  json map = json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const TensorCopy& t : shards[i]) map[t.name] = shard_name(i, shards.size());
  }
  const json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  write_file_atomic(folder + "/model.safetensors.index.json", index.dump(2) + "\n");
}

}  // namespace

HubFolderResult write_hub_folder(const HubFolder& hub) {
  const std::vector<TensorCopy> tensors = hub_tensors(hub, hf_family(hub.model.family));
  const std::vector<ShardCopy> shards = into_shards(tensors, hub.shard_bytes);
  NewFolder folder(hub.out);
  HubFolderResult result{.num_tensors = static_cast<int64_t>(tensors.size()),
                         .num_shards = static_cast<int64_t>(shards.size())};
  for (const TensorCopy& t : tensors) result.bytes += t.bytes();
  for (size_t i = 0; i < shards.size(); ++i) {
    write_shard(folder.path() + "/" + shard_name(i, shards.size()), shards[i], hub.weights, hub.should_stop,
                &result.not_finite)
        .close();
  }
  if (shards.size() > 1) write_index(folder.path(), shards, result.bytes);
  write_file_atomic(folder.path() + "/config.json", config_of(hub.model, tensors).dump(2) + "\n");
  if (!hub.files.empty()) result.num_files = copy_other_files(hub.files, folder.path(), hub.should_stop);
  folder.commit();
  return result;
}

std::string other_files_of(const WeightsFolder& from) {
  if (from.kind == WeightsFolder::Kind::hugging_face) return from.path;
  const std::string kept = from.path + "/" + kImportedFiles;
  return fs::is_directory(kept) ? kept : "";
}

}  // namespace moebius
