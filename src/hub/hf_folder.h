// A Hugging Face model folder: config.json, and the weights in model.safetensors or in shards with
// model.safetensors.index.json.
// The whole folder is checked at open. consume() records which tensors the model uses.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/safetensors.h"

namespace moebius {

class HfFolder {
 public:
  // Throws Error{input} for each of these:
  // - no config.json, or no weights;
  // - pickled weights (.bin, .pt, .pth);
  // - an index that names other tensors than the shards hold, or files outside the folder;
  // - a tensor in two shards;
  // - a single file together with an index;
  // - any model*.safetensors that is not read.
  // Other *.safetensors, such as the consolidated.safetensors of Mistral, are copies in another
  // layout and are ignored.
  static HfFolder open(const std::string& dir);

  const std::string& dir() const { return dir_; }
  const nlohmann::json& config() const { return config_; }  // an object, otherwise unchecked
  std::vector<std::string> names() const;                   // sorted

  const SafetensorsEntry* find(const std::string& name) const;  // null when there is none
  const SafetensorsEntry& at(const std::string& name) const;    // throws Error{input} when there is none
  void read(const std::string& name, void* dst) const;
  void read(const std::string& name, int64_t byte_begin, int64_t byte_end, void* dst) const;

  // Records that the model uses a tensor. So each tensor on disk is either used or reported by
  // unconsumed(). Recording one twice is allowed, since a fused tensor fills many parameters.
  // REQUIRES: the tensor exists.
  void consume(const std::string& name);
  std::vector<std::string> unconsumed() const;  // sorted

 private:
  struct Place {
    size_t file = 0;
    SafetensorsEntry entry;
  };
  void open_shards();
  void refuse_stray_files() const;
  void add_file(const std::string& file_name);
  const Place& place(const std::string& name) const;

  std::string dir_;
  nlohmann::json config_;
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string, Place> places_;
  std::set<std::string> unconsumed_;
};

// Parses the text of a model.safetensors.index.json, and returns the file name of each tensor. Its
// folder is not read.
// Throws Error{input} that names the index unless every file is a .safetensors in
// the folder itself.
std::map<std::string, std::string> parse_weight_map(std::string_view text, const std::string& path);

// Returns "a, b, c and 7 more", with at most `limit` of the names.
std::string name_list(const std::vector<std::string>& names, size_t limit = 20);

}  // namespace moebius
