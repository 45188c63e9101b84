// A JsonField is a parsed JSON value for typed reading, with the path that led to it.
// Every error names that path.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

class JsonField {
 public:
  // REQUIRES: the value outlives the field.
  // `path` is the file; keys are appended to it: "DIR/tokenizer.json: model.type".
  JsonField(const nlohmann::json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }

  bool has(const char* key) const;             // whether the key exists and is not null
  JsonField at(const std::string& key) const;  // throws Error{input} when the key does not exist
  std::vector<JsonField> items() const;        // the elements of an array

  const std::string& string() const;
  char32_t character() const;  // a string of one character
  bool boolean() const;
  int64_t integer(int64_t min, int64_t max) const;
  bool boolean_or(const char* key, bool otherwise) const { return has(key) ? at(key).boolean() : otherwise; }

  // Throws Error{input}: "PATH: expected EXPECTED; got VALUE; ACTION".
  [[noreturn]] void fail(std::string_view expected, std::string_view action = "correct the file") const;

 private:
  const nlohmann::json* value_;
  std::string path_;
};

}  // namespace moebius
