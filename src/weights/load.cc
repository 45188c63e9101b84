#include "weights/load.h"

#include <algorithm>
#include <map>

#include "checkpoint/reader.h"
#include "io/json_text.h"
#include "weights/import.h"
#include "weights/source.h"

namespace moebius {

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
    if (!(p.has_master || p.has_remainder) || here.count == 0) return;
    const Tensor master = owned_part_of(p.master(), p, part);
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

}  // namespace

std::vector<NotFinite> load_weights(Stream& s, Model& model, const std::string& path) {
  const WeightsFolder from = find_weights(path);
  const std::unique_ptr<WeightsReader> reader = open_weights(from, model.base_catalog());
  std::map<std::string, size_t> entries;
  for (size_t i = 0; i < reader->entries().size(); ++i) entries[reader->entries()[i].name] = i;
  PartLoader loader(s, *reader, from.path);
  for (const Param& p : model.params().all()) {
    for (const ParamPart& part : p.spec.parts)
      if (const auto it = entries.find(part.name); it != entries.end()) loader.load(it->second, p, part);
  }
  model.params().split_masters(s);
  return loader.not_finite();
}

void check_weights(const std::string& path, const ModelSpec& model) {
  open_weights(find_weights(path), ModelCatalog(model, /*holds_mtp=*/false));
}

}  // namespace moebius
