#include "train/weights.h"

#include <filesystem>
#include <map>

#include "io/json_text.h"
#include "train/checkpoint.h"
#include "train/import.h"
#include "train/weights_source.h"

namespace moebius {

namespace fs = std::filesystem;

namespace {

nlohmann::json meta_value(const std::string& folder, const char* key) {
  const CheckpointReader reader(folder);
  const nlohmann::json& meta = reader.meta();
  MOEBIUS_CHECK(input, meta.is_object() && meta.contains(key),
                "checkpoint {}: expected \"{}\" in its meta data; got none; it was not written by a training run",
                folder, key);
  return meta.at(key);
}

// A model that cannot be is bad input here: its keys come from a file.
ModelSpec checked_spec(const nlohmann::json& config, const std::string& who) {
  ModelSpec spec = model_spec_from_hf(config, who);
  try {
    spec.check();
  } catch (const Error& error) {
    throw Error(ErrorKind::input, who + ": " + error.what());
  }
  return spec;
}

}  // namespace

WeightsFolder find_weights(const std::string& path) {
  MOEBIUS_CHECK(input, fs::is_directory(path), "model {}: expected a folder; got {}; check the path", path,
                fs::exists(path) ? "a file" : "nothing there");
  if (fs::exists(path + "/manifest.json")) return {WeightsFolder::Kind::checkpoint, path};
  if (fs::exists(path + "/config.json")) return {WeightsFolder::Kind::hugging_face, path};
  for (const std::string& dir : {path, path + "/checkpoints"}) {
    if (const auto newest = newest_checkpoint(dir, nullptr)) return {WeightsFolder::Kind::checkpoint, *newest};
  }
  MOEBIUS_FAIL(input,
               "model {}: expected a Hugging Face folder (config.json), a checkpoint (manifest.json) or a run's folder "
               "with a complete "
               "checkpoint; got none of them; check the path",
               path);
}

ModelSpec read_model_spec(const std::string& path) {
  const WeightsFolder from = find_weights(path);
  if (from.kind == WeightsFolder::Kind::hugging_face) {
    const std::string config = from.path + "/config.json";
    return checked_spec(read_json(config), config);
  }
  return checked_spec(meta_value(from.path, "model"), from.path + ": model");
}

std::optional<RunSpec> read_run_spec(const std::string& path) {
  const WeightsFolder from = find_weights(path);
  if (from.kind == WeightsFolder::Kind::hugging_face) return std::nullopt;
  if (CheckpointReader(from.path).meta().contains(kImportedKey)) return std::nullopt;
  const nlohmann::json recipe = meta_value(from.path, "recipe");
  MOEBIUS_CHECK(input, recipe.is_string(),
                "checkpoint {}: expected its recipe as a text; got {}; it was not written by a training run", from.path,
                recipe.type_name());
  return parse_run_spec(recipe.get<std::string>(), from.path + ": recipe", {});
}

std::unique_ptr<WeightsReader> open_weights(const WeightsFolder& from, const Model& model) {
  return from.kind == WeightsFolder::Kind::hugging_face ? open_hugging_face(from.path, model)
                                                        : open_checkpoint(from.path, model);
}

void load_weights(Stream& s, Model& model, const std::string& path) {
  const WeightsFolder from = find_weights(path);
  const std::unique_ptr<WeightsReader> reader = open_weights(from, model);
  std::map<std::string, Tensor> parts;
  for (const Param& p : model.params().all()) {
    for (const ParamPart& part : p.spec.parts) parts.emplace(part.name, part_of(p.master(), part));
  }
  std::vector<char> bytes;
  for (size_t i = 0; i < reader->entries().size(); ++i) {
    const WeightsEntry& entry = reader->entries()[i];
    bytes.resize(entry.bytes());
    reader->read(i, bytes.data());
    convert_elements(s, parts.at(entry.name), bytes.data(), entry.dtype, from.path + ": " + entry.name);
  }
  model.params().sync(s);
}

bool is_training_state(const std::string& name) { return name.ends_with(".last_load"); }

}  // namespace moebius
