#include "hub/hf_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "core/error.h"
#include "io/files.h"
#include "io/json_text.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kSingle = "model.safetensors", kIndex = "model.safetensors.index.json";

[[noreturn]] void fail_without_weights(const std::string& dir) {
  for (const auto& file : fs::directory_iterator(dir)) {
    const std::string ext = file.path().extension().string();
    MOEBIUS_CHECK(input, ext != ".bin" && ext != ".pt" && ext != ".pth",
                  "model folder {}: expected safetensors; got {}, a pickle, which can run code when it is loaded; "
                  "convert it with transformers: save_pretrained(..., safe_serialization=True)",
                  dir, file.path().filename().string());
  }
  MOEBIUS_FAIL(input, "model folder {}: expected {} or {}; got neither; fetch the weights", dir, kSingle, kIndex);
}

}  // namespace

std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& path) {
  const nlohmann::json json = parse_json(text, path);
  const auto it = json.is_object() ? json.find("weight_map") : json.end();
  MOEBIUS_CHECK(input, it != json.end() && it->is_object() && !it->empty(),
                "{}: expected an object \"weight_map\" of tensors; got none; fetch the index again", path);
  std::map<std::string, std::string> map;
  for (const auto& [tensor, file] : it->items()) {
    MOEBIUS_CHECK(input, file.is_string(), "{}: expected a file name for \"{}\"; got {}; fetch the index again", path,
                  tensor, file.dump());
    const auto& name = file.get_ref<const std::string&>();
    const bool plain =
        name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos && name.find("..") == std::string::npos;
    MOEBIUS_CHECK(
        input, plain && name.ends_with(".safetensors"),
        "{}: expected the name of a .safetensors file in the folder; got \"{}\" for \"{}\"; fetch the index again",
        path, name, tensor);
    map.emplace(tensor, name);
  }
  return map;
}

std::string name_list(const std::vector<std::string>& names, size_t limit) {
  const auto shown = std::min(names.size(), limit);
  const std::string list = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  return shown == names.size() ? list : fmt::format("{} and {} more", list, names.size() - shown);
}

HfFolder HfFolder::open(const std::string& dir) {
  MOEBIUS_CHECK(input, fs::is_directory(dir), "model folder {}: expected a folder; got {}; check the path", dir,
                fs::exists(dir) ? "a file" : "nothing there");
  HfFolder folder;
  folder.dir_ = dir;
  folder.config_ = read_json(dir + "/config.json");
  MOEBIUS_CHECK(input, folder.config_.is_object(), "{}/config.json: expected an object; got {}; fetch it again", dir,
                folder.config_.type_name());
  const bool has_single = fs::exists(fs::path(dir) / kSingle), has_index = fs::exists(fs::path(dir) / kIndex);
  MOEBIUS_CHECK(input, !has_single || !has_index,
                "model folder {}: expected {} or {}; got both, and readers differ in which one they load; "
                "remove one of them",
                dir, kSingle, kIndex);
  if (!has_single && !has_index) fail_without_weights(dir);
  if (has_single)
    folder.add_file(std::string(kSingle));
  else
    folder.open_shards();
  folder.refuse_stray_files();
  for (const auto& [name, place] : folder.places_) folder.unconsumed_.insert(name);
  return folder;
}

void HfFolder::add_file(const std::string& file_name) {
  files_.push_back(SafetensorsFile::open(dir_ + "/" + file_name));
  for (const SafetensorsEntry& entry : files_.back().entries()) {
    const auto [it, is_new] = places_.emplace(entry.name, Place{files_.size() - 1, entry});
    MOEBIUS_CHECK(input, is_new,
                  "model folder {}: expected each tensor in one file; got \"{}\" in {} and {}; fetch them again", dir_,
                  entry.name, files_[it->second.file].path(), files_.back().path());
  }
}

void HfFolder::open_shards() {
  const std::string index = fmt::format("{}/{}", dir_, kIndex);
  const std::map<std::string, std::string> weight_map = parse_weight_map(read_file(index), index);
  std::set<std::string> file_names;
  for (const auto& [tensor, file] : weight_map) file_names.insert(file);
  for (const std::string& file : file_names) add_file(file);

  std::vector<std::string> missing, unlisted;
  for (const auto& [tensor, file] : weight_map) {
    const auto it = places_.find(tensor);
    if (it == places_.end() || files_[it->second.file].path() != dir_ + "/" + file) missing.push_back(tensor);
  }
  for (const auto& [tensor, place] : places_) {
    if (!weight_map.contains(tensor)) unlisted.push_back(tensor);
  }
  std::sort(unlisted.begin(), unlisted.end());
  MOEBIUS_CHECK(input, missing.empty() && unlisted.empty(),
                "{}: expected the tensors of its shards; got {} that are not in the file it names ({}) and {} in the "
                "files that it "
                "does not name ({}); fetch index and shards again",
                index, missing.size(), name_list(missing), unlisted.size(), name_list(unlisted));
}

// Refuses files of weights that are not read: they belong to another model, or the index does.
void HfFolder::refuse_stray_files() const {
  std::set<std::string> read;
  for (const SafetensorsFile& file : files_) read.insert(fs::path(file.path()).filename().string());
  std::vector<std::string> stray;
  for (const auto& file : fs::directory_iterator(dir_)) {
    const std::string name = file.path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors") && !read.contains(name)) stray.push_back(name);
  }
  std::sort(stray.begin(), stray.end());
  MOEBIUS_CHECK(
      input, stray.empty(),
      "model folder {}: expected no model*.safetensors other than {}; got {} that it does not name ({}); remove "
      "them, or fetch the index that names them",
      dir_, fs::exists(fs::path(dir_) / kIndex) ? "those of " + std::string(kIndex) : std::string(kSingle),
      stray.size(), name_list(stray));
}

std::vector<std::string> HfFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

const SafetensorsEntry* HfFolder::find(const std::string& name) const {
  const auto it = places_.find(name);
  return it == places_.end() ? nullptr : &it->second.entry;
}

const HfFolder::Place& HfFolder::place(const std::string& name) const {
  const auto it = places_.find(name);
  MOEBIUS_CHECK(input, it != places_.end(),
                "model folder {}: expected a tensor \"{}\"; got {} others; check config and weights", dir_, name,
                places_.size());
  return it->second;
}

const SafetensorsEntry& HfFolder::at(const std::string& name) const { return place(name).entry; }

void HfFolder::read(const std::string& name, void* dst) const { read(name, 0, at(name).bytes, dst); }

void HfFolder::read(const std::string& name, int64_t byte_begin, int64_t byte_end, void* dst) const {
  const Place& p = place(name);
  files_[p.file].read(p.entry, byte_begin, byte_end, dst);
}

void HfFolder::consume(const std::string& name) {
  at(name);
  unconsumed_.erase(name);
}

std::vector<std::string> HfFolder::unconsumed() const { return {unconsumed_.begin(), unconsumed_.end()}; }

}  // namespace moebius
