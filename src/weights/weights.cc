#include "weights/weights.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"
#include "io/json_text.h"
#include "weights/import.h"
#include "weights/weights_source.h"

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

void WeightsReader::read_slice(size_t entry, const TensorSlice& slice, void* dst) const {
  const WeightsEntry& e = entries()[entry];
  std::vector<char> all(e.bytes());
  read(entry, all.data());
  const int64_t size = size_of(e.dtype);
  for (const CommonRun& run : common_runs(whole_slice(slice.shape), slice))
    std::memcpy(static_cast<char*>(dst) + run.in_b * size, all.data() + run.in_a * size, run.count * size);
}

namespace {

constexpr int64_t kMostElements = int64_t{1} << 26;  // in memory at a time, beside the model

// The block of one part: the weights that ops read, and the masters of what this rank owns of it.
class PartLoader {
 public:
  PartLoader(Stream& s, const WeightsReader& reader, std::string who) : s_(s), reader_(reader), who_(std::move(who)) {}

  void load(size_t entry, const Param& p, const ParamPart& part) {
    const int64_t numel = part.local_shape().numel();
    for (int64_t begin = 0; begin < numel; begin += kMostElements)
      load(entry, p, part, {.begin = begin, .count = std::min(kMostElements, numel - begin)});
  }
  const std::vector<NotFinite>& not_finite() const { return not_finite_; }

 private:
  void load(size_t entry, const Param& p, const ParamPart& part, const ElementRange& range) {
    const WeightsEntry& e = reader_.entries()[entry];
    bytes_.resize(range.count * size_of(e.dtype));
    reader_.read_slice(entry, {dims_of(part.shape), part.shard, range.begin, range.end()}, bytes_.data());
    const Tensor w = part_of(p.w, part);
    add_not_finite(&not_finite_, e.name, count_not_finite(bytes_.data(), e.dtype, range.count, w.dtype));
    convert(e, w.view({w.numel()}).rows(range.begin, range.end()), 0);
    const ElementRange owned = owned_of(p, part), here = common(owned, range);
    if (!p.has_master || here.count == 0) return;
    const Tensor master = owned_part_of(p.master_n, p, part);
    convert(e, master.rows(here.begin - owned.begin, here.end() - owned.begin), here.begin - range.begin);
  }
  void convert(const WeightsEntry& e, const Tensor& to, int64_t first) {
    convert_elements(s_, to, bytes_.data() + first * size_of(e.dtype), e.dtype, who_ + ": " + e.name);
  }

  Stream& s_;
  const WeightsReader& reader_;
  std::string who_;
  std::vector<char> bytes_;
  std::vector<NotFinite> not_finite_;
};

// `whole` says which tensors there must be; what `model` holds of them is read.
std::vector<NotFinite> load_weights(Stream& s, const Model& whole, const Model& model, const std::string& path) {
  const WeightsFolder from = find_weights(path);
  const std::unique_ptr<WeightsReader> reader = open_weights(from, whole);
  std::map<std::string, size_t> entries;
  for (size_t i = 0; i < reader->entries().size(); ++i) entries[reader->entries()[i].name] = i;
  PartLoader loader(s, *reader, from.path);
  for (const Param& p : model.params().all()) {
    for (const ParamPart& part : p.spec.parts)
      if (const auto it = entries.find(part.name); it != entries.end()) loader.load(it->second, p, part);
  }
  return loader.not_finite();
}

}  // namespace

std::vector<NotFinite> load_weights(Stream& s, Model& model, const std::string& path) {
  return load_weights(s, model, model, path);
}

std::vector<NotFinite> load_weights(Engine& engine, const std::string& path) {
  EngineSpec spec = engine.spec();
  spec.mesh = {};
  spec.world = nullptr;
  spec.device = DeviceKind::null;
  Engine whole(spec);
  Stream s = engine.stream();
  return load_weights(s, whole.model(), engine.model(), path);
}

void check_weights(const std::string& path, const ModelSpec& model) {
  const WeightsFolder from = find_weights(path);
  const Engine shapes({.model = model, .shape = {.batch = 1, .seq = 1}, .device = DeviceKind::null});
  open_weights(from, shapes.model());
}

bool is_training_state(const std::string& name) { return name.ends_with(".last_load"); }

}  // namespace moebius
