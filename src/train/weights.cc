#include "train/weights.h"

#include <filesystem>

#include "io/json_text.h"
#include "train/checkpoint.h"
#include "train/weights_source.h"

namespace moebius {

namespace fs = std::filesystem;

WeightsFolder find_weights(const std::string& path) {
  MOEBIUS_CHECK(input, fs::is_directory(path), "model {}: expected a folder; got {}; check the path", path,
                fs::exists(path) ? "a file" : "nothing there");
  if (fs::exists(path + "/manifest.json")) return {WeightsFolder::Kind::checkpoint, path};
  if (fs::exists(path + "/config.json")) return {WeightsFolder::Kind::hugging_face, path};
  for (const std::string& dir : {path, path + "/checkpoints"}) {
    if (const auto newest = newest_checkpoint(dir, nullptr)) return {WeightsFolder::Kind::checkpoint, *newest};
  }
  MOEBIUS_FAIL(input,
               "model {}: expected a Hugging Face folder (config.json), a checkpoint (manifest.json) or a run's folder with a complete "
               "checkpoint; got none of them; check the path",
               path);
}

ModelSpec read_model_spec(const std::string& path) {
  const WeightsFolder from = find_weights(path);
  if (from.kind == WeightsFolder::Kind::hugging_face) {
    const std::string config = from.path + "/config.json";
    return model_spec_from_hf(read_json(config), config);
  }
  const nlohmann::json meta = CheckpointReader(from.path).meta();
  MOEBIUS_CHECK(input, meta.is_object() && meta.contains("model"), "checkpoint {}: expected the model's config in its meta data; got none; it was not written by a training run",
                from.path);
  return model_spec_from_hf(meta.at("model"), from.path + ": model");
}

void load_weights(Stream& s, Model& model, const std::string& path) {
  const WeightsFolder from = find_weights(path);
  if (from.kind == WeightsFolder::Kind::hugging_face) load_hugging_face(s, model, from.path);
  else load_checkpoint_weights(s, model, from.path);
  model.params().sync(s);
}

bool is_training_state(const std::string& name) { return name.ends_with(".last_load"); }

}  // namespace moebius
