// Typed reading of a config.json. The constructor checks the type and range of every known key of
// its family, so that reads cannot fail. Keys that the family does not have read as missing.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "config/hf/keys.h"
#include "core/error.h"

namespace moebius {

class HfReader {
 public:
  // Errors have this kind and begin with `who`. The config is not copied and must
  // outlive the reader.
  HfReader(const nlohmann::json& config, std::string who, ErrorKind kind);

  const std::string& family() const { return family_; }  // model_type
  bool has(const std::string& key) const;                // present, and not null
  bool is_null(const std::string& key) const;            // present, and null

  // Returns the value, or fallback if the key is missing or null.
  template <class T>
  T get(const std::string& key, T fallback) const {
    return has(key) ? config_.at(key).template get<T>() : fallback;
  }
  template <class T>
  void read(const std::string& key, T& value) const {
    value = get(key, value);
  }

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) const {
    throw Error(kind_, fmt::format("{}: {}", who_, fmt::format(text, std::forward<Args>(args)...)));
  }

 private:
  bool present(const std::string& key) const;
  void check_type(const HfKey& key) const;

  const nlohmann::json& config_;
  std::string who_;
  ErrorKind kind_;
  std::string family_;
};

}  // namespace moebius
