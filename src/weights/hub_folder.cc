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

// Scores are closer together than bf16 can distinguish, so their correction keeps its own dtype.
bool keeps_its_dtype(const std::string& name) { return name.ends_with(".e_score_correction_bias"); }

// Released models carry the embedding and the head once more in each module
// of multi-token prediction.
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

// The tensors under the hub's names; where experts are one there, they are gathered.
std::vector<TensorCopy> hub_tensors(const HubFolder& hub, HfFamily family) {
  std::vector<TensorCopy> tensors;
  std::map<std::string, size_t> fused;
  for (size_t i = 0; i < hub.weights.entries().size(); ++i) {
    const WeightsEntry& entry = hub.weights.entries()[i];
    if (is_training_state(entry.name)) continue;
    const DType dtype = keeps_its_dtype(entry.name) ? entry.dtype : hub.dtype.value_or(entry.dtype);
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

// torch_dtype says what all tensors are; where they differ it stays what it was.
json config_of(const ModelSpec& model, const std::vector<TensorCopy>& tensors) {
  json config = hf_from_model_spec(model);
  config.erase("quantization_config");  // the weights are unpacked
  if (!config.contains("architectures")) config["architectures"] = {find_family(model.family)->architecture};
  std::set<DType> dtypes;
  for (const TensorCopy& t : tensors) {
    if (!keeps_its_dtype(t.name)) dtypes.insert(t.dtype);
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
    write_shard(folder.path() + "/" + shard_name(i, shards.size()), shards[i], hub.weights, &result.not_finite).close();
  }
  if (shards.size() > 1) write_index(folder.path(), shards, result.bytes);
  write_file_atomic(folder.path() + "/config.json", config_of(hub.model, tensors).dump(2) + "\n");
  if (!hub.files.empty()) result.num_files = copy_other_files(hub.files, folder.path());
  folder.commit();
  return result;
}

std::string other_files_of(const WeightsFolder& from) {
  if (from.kind == WeightsFolder::Kind::hugging_face) return from.path;
  const std::string kept = from.path + "/" + kImportedFiles;
  return fs::is_directory(kept) ? kept : "";
}

}  // namespace moebius
